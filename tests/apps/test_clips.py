"""Clips at a chosen rate, and several heads that share the reading of a source."""

from __future__ import annotations

import csv
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from apps.video_analytics import Chunk, ChunkResult, ClipShape, Source, read_clips, run
from apps.video_analytics import sources as sources_module
from apps.video_analytics.asked import find_groups
from apps.video_analytics.sampling import Frame, Sampler
from apps.video_analytics.source_reader import SourceReader
from tests.apps.test_video_analytics import file_source, labels
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from tests.video_files import shades, write_video
from vlora.client import Client, FrameStream, TextQuestion
from vlora.errors import BadConfig, BadImage, BadRequest, UnknownHead


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 2, "one": 1}}) as running:
        yield running


def write_ramp(path: Path, num_frames: int, fps: int = 10) -> Path:
    """Each frame is eight levels brighter than the previous one, so that its shade identifies it."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (64, 48))
    for place in range(num_frames):
        writer.write(np.full((48, 64, 3), 8 * place, np.uint8))
    writer.release()
    return path


def numbers(clip: Chunk) -> list[int]:
    """The indices of a clip's frames in a ramp."""
    pictures = [cv2.imdecode(np.frombuffer(frame, np.uint8), cv2.IMREAD_COLOR) for frame in clip.frames]
    return [round(float(picture.mean()) / 8) for picture in pictures if picture is not None]


def place_of(text: str) -> Frame:
    return Frame(lambda: text.encode(), lambda: text.upper().encode(), 64)


def count_openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The address of each video as it is opened."""
    opened: list[str] = []
    capture = cv2.VideoCapture

    def counted(address: Any) -> Any:
        opened.append(address)
        return capture(address)

    monkeypatch.setattr(sources_module.cv2, "VideoCapture", counted)
    return opened


# -- clips ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (ClipShape(2, 5), [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18], [20, 20]]),  # every other frame
        (ClipShape(2, 4), [[0, 2], [5, 7], [10, 12], [15, 17], [20, 20]]),  # between frames the earlier one
        (ClipShape(1, 2), [[0], [5], [10], [15], [20]]),
        (ClipShape(3, 10), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17], [18, 19, 20]]),
        (ClipShape(4, 2), [[0, 5, 10, 15], [20, 20, 20, 20]]),  # two seconds each
        (ClipShape(2), [[0, 9], [10, 19], [20, 20]]),  # a second each
        (ClipShape(1), [[5], [15], [20]]),
    ],
)
def test_a_clip_has_the_frames_of_its_rate(tmp_path: Path, shape: ClipShape, wanted: list[list[int]]) -> None:
    source = file_source(write_ramp(tmp_path / "ramp.mp4", 21))
    clips = [clip for _, clip in read_clips(source, [shape])]
    assert [numbers(clip) for clip in clips] == wanted
    seconds = 1.0 if shape.fps is None else shape.num_frames / shape.fps
    assert [clip.seconds for clip in clips] == [seconds] * len(clips)
    assert [clip.start_s for clip in clips] == pytest.approx([index * seconds for index in range(len(clips))])


def sampled(shape: ClipShape, times: Sequence[float], shown: bool = False, broken: Sequence[int] = ()) -> list[Chunk]:
    """The clips of frames that contain their index."""
    sampler, clips = Sampler(shape, times[1] - times[0], shown), []
    for index, time_s in enumerate(times):
        clips.append(sampler.advance(time_s))
        clips.append(sampler.add(place_of(str(index)) if sampler.wants and index not in broken else None))
    return [clip for clip in (*clips, sampler.rest()) if clip is not None]


@pytest.mark.parametrize("rate", [23.976, 25.0, 29.97, 59.94])
@pytest.mark.parametrize("fps", [1.0, 4.0, 7.5, 23.976])
def test_at_any_rate_clips_follow_each_other_and_frames_their_time(rate: float, fps: float) -> None:
    times = [round(index / rate, 3) for index in range(round(20 * rate))]  # Matroska has milliseconds
    clips = [clip for clip in sampled(ClipShape(4, fps), times, shown=True) if clip.start_s + clip.seconds <= 20]
    taken = [int(frame) for clip in clips for frame in clip.frames]
    assert len(taken) == len(set(taken)) and abs(len(taken) - 20 * fps) <= 5
    for number, index in enumerate(taken):
        assert -0.3 / rate < number / fps - index / rate < 1 / rate, "the last frame available at its time"
    shown = [int(picture) for clip in clips for picture in clip.shown]
    assert shown == sorted(set(shown)) and len(shown) <= 10 * (len(clips) * 4 / fps) + len(clips)
    for clip in clips:
        own = [times[int(picture)] - clip.start_s for picture in clip.shown]
        assert clip.shown_s == pytest.approx(own), "each picture has its time"


@pytest.mark.parametrize(
    ("rate", "num_frames", "length"), [(29.97, 2, 29.97), (12.5, 1, 12.5), (7.5, 4, 7.5), (0.5, 2, 2), (5.0, 8, 8)]
)
@pytest.mark.parametrize("shown", [False, True])
def test_a_clip_without_a_rate_starts_with_its_first_frame(
    rate: float, num_frames: int, length: float, shown: bool
) -> None:
    clips = sampled(ClipShape(num_frames), [index / rate for index in range(int(40 * length) + 1)], shown)
    assert 40 <= len(clips) <= 42 and [clip.index for clip in clips] == list(range(len(clips)))
    for clip, after in itertools.pairwise(clips):
        assert clip.start_s * rate == pytest.approx(round(clip.start_s * rate)), "the time of a frame"
        assert after.start_s - clip.start_s == pytest.approx(clip.seconds, abs=1.1 / rate)
        assert clip.start_s == pytest.approx(clip.index * max(1, length / rate), abs=1.1 / rate), "they do not drift"
        assert clip.start_s <= int(clip.frames[0]) / rate <= int(clip.frames[-1]) / rate < after.start_s


@pytest.mark.parametrize("num_frames", [1, 4])
@pytest.mark.parametrize("length", [1, 3, 14])
def test_a_video_shorter_than_a_clip_is_one_clip(tmp_path: Path, num_frames: int, length: int) -> None:
    source = file_source(write_ramp(tmp_path / "short.mp4", length, fps=30))
    ((_, clip),) = read_clips(source, [ClipShape(num_frames)], shown=True)
    assert clip.start_s == 0 and len(clip.frames) == num_frames and numbers(clip)[0] == 0 and clip.width == 64


def test_a_clip_whose_frame_cannot_be_decoded_has_another_one() -> None:
    clips = sampled(ClipShape(1), [index / 10 for index in range(10)], broken=(0, 5))
    assert [clip.frames for clip in clips] == [(b"1",)]


def test_heads_of_different_sizes_read_one_video_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = count_openings(monkeypatch)
    source = file_source(write_ramp(tmp_path / "ramp.mp4", 20))
    clips = list(read_clips(source, [ClipShape(2, 4), ClipShape(1, 2), ClipShape(4)]))
    assert len(opened) == 1
    by_head = [[numbers(clip) for place, clip in clips if place == head] for head in range(3)]
    assert by_head[0] == [[0, 2], [5, 7], [10, 12], [15, 17]] and by_head[1] == [[0], [5], [10], [15]]
    assert by_head[2] == [[0, 3, 6, 9], [10, 13, 16, 19]]
    assert [clip.index for place, clip in clips if place == 0] == [0, 1, 2, 3]


def test_a_rate_above_a_files_is_refused_and_above_a_cameras_capped(tmp_path: Path) -> None:
    source = file_source(write_ramp(tmp_path / "ramp.mp4", 12))
    with pytest.raises(BadImage, match=r"ramp\.mp4' at 25 frames per second: it has 10 on average; give a lower --fps"):
        list(read_clips(source, [ClipShape(1, 25)]))
    lines: list[str] = []
    camera = source._replace(kind="live")
    clips = itertools.islice(read_clips(camera, [ClipShape(1, 25), ClipShape(1, 25)], say=lines.append), 24)
    assert [(place, numbers(clip)) for place, clip in clips] == [(n % 2, [n // 2]) for n in range(24)]
    assert lines == ["ramp: the camera declares 10 frames per second, not 25; missing frames are repeated"], (
        "once for all heads"
    )


def test_pictures_of_a_folder_go_to_every_head(tmp_path: Path) -> None:
    for place in range(5):
        (tmp_path / f"{place}.png").write_bytes(png(40 * place))
    clips = list(read_clips(file_source(tmp_path), [ClipShape(2), ClipShape(1)]))
    assert [len(clip.frames) for place, clip in clips if place == 0] == [2, 2, 2]
    assert [clip.index for place, clip in clips if place == 1] == [0, 1, 2, 3, 4]


# -- reading ----------------------------------------------------------------------------------------------------------


def fed(monkeypatch: pytest.MonkeyPatch, kind: Any, number: int, pause_s: float = 0.0) -> SourceReader:
    """A reading for two heads, with this many clips for each."""

    def clips(source: Source, shapes: Sequence[ClipShape], **_: object) -> Iterator[tuple[int, Chunk]]:
        for index in range(number):
            time.sleep(pause_s)
            for head in range(len(shapes)):
                yield head, Chunk(index, float(index), (b"frame",))

    monkeypatch.setattr("apps.video_analytics.source_reader.read_clips", clips)
    return SourceReader(Source("s", "0", kind), [ClipShape(1), ClipShape(1)], stop=threading.Event())


def test_a_slow_head_does_not_hold_up_the_others_of_a_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, gone = fed(monkeypatch, "live", 20, pause_s=0.01), threading.Event()
    taken = [clip.index for clip in iter(lambda: reader.take(0, gone), None)]
    assert taken == list(range(20)), "the other head has taken no clip"
    gap, *left = iter(lambda: reader.take(1, gone), None)
    assert [clip.index for clip in left] == [18, 19], "the newest clips are left"
    assert (gap.index, gap.start_s, gap.seconds, gap.frames) == (0, 0.0, 18.0, ())
    assert gap.problem == "newer clips replaced 18 clips before they could be sent"
    for head in range(2):
        reader.leave(head)


def test_a_file_waits_for_every_head_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, gone = fed(monkeypatch, "file", 50), threading.Event()
    taken = [reader.take(0, gone) for _ in range(3)]
    assert all(taken)
    reader.leave(1)  # its stream has failed
    assert len([clip for clip in iter(lambda: reader.take(0, gone), None)]) == 47
    reader.leave(0)
    assert not reader.running


# -- whole runs -------------------------------------------------------------------------------------------------------


def test_two_heads_write_their_answers_into_separate_files(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = file_source(write_video(tmp_path / "street.mp4", shades(4)))
    results: list[ChunkResult] = []
    opened = count_openings(monkeypatch)
    counts = run(client, [source], "cam", ("night", "one"), fps=2, out=tmp_path / "out", on_result=results.append)
    assert counts == {"street.night": 4, "street.one": 8} and opened == [source.address]
    assert {name.name for name in (tmp_path / "out").iterdir()} == {
        f"street.{head}.{kind}" for head in ("night", "one") for kind in ("jsonl", "csv", "webm")
    }
    for head, times in (("night", 1), ("one", 2)):
        lines = [json.loads(line) for line in (tmp_path / "out" / f"street.{head}.jsonl").read_text().splitlines()]
        assert [line["label"] for line in lines] == [label for label in labels(4) for _ in range(times)]
        assert [line["start_s"] for line in lines] == [index / times for index in range(4 * times)]
        assert {line["head"] for line in lines} == {head}
        with (tmp_path / "out" / f"street.{head}.csv").open(newline="") as file:
            assert {row["head"] for row in csv.DictReader(file)} == {head}
        capture = cv2.VideoCapture(str(tmp_path / "out" / f"street.{head}.webm"))
        assert capture.get(cv2.CAP_PROP_FPS) == 10 and capture.get(cv2.CAP_PROP_FRAME_COUNT) == 40
    for head, number in (("night", 4), ("one", 8)):
        assert [result.index for result in results if result.head == head] == list(range(number))


def test_heads_and_questions_about_one_frame_share_its_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = file_source(write_video(tmp_path / "street.mp4", shades(3)))
    results: list[ChunkResult] = []
    sent: list[int] = []
    send = FrameStream.send

    def counting(stream: FrameStream, *images: Any) -> int:
        sent.append(len(images))
        return send(stream, *images)

    monkeypatch.setattr(FrameStream, "send", counting)
    adapters = {"cam": {"night": 1, "clip": 2}, "zoo": {"night": 1, "kind": 1}}
    with running_server(adapters) as running, Client(port=running.port) as client:
        counts = run(
            client,
            [source],
            ("cam", "zoo"),
            ("cam/night", "kind", "clip"),
            questions=("say:What is it?",),
            max_tokens=4,
            out=tmp_path / "out",
            on_result=results.append,
        )
    names = ["cam-night", "zoo-kind", "cam-say-What-is-it", "zoo-say-What-is-it", "cam-clip"]
    assert counts == {f"street.{name}": 3 for name in names}
    assert sorted(sent) == [1, 1, 1, 2, 2, 2], "one frame for four answers, and two for the head that reads two"
    shown = {(each.adapter, each.head, each.question, each.label) for each in results if each.index == 1}
    assert shown == {
        ("cam", "night", "", "dark"),
        ("zoo", "kind", "", "dark"),
        ("cam", "clip", "", "dark"),
        ("cam", "", "say:What is it?", "What"),
        ("zoo", "", "say:What is it?", "What"),
    }
    assert all((each.text is None) == bool(each.head) and each.problem is None for each in results)
    with (tmp_path / "out" / "street.zoo-say-What-is-it.csv").open(newline="") as file:
        rows = [(row["adapter"], row["question"], row["label"]) for row in csv.DictReader(file)]
    assert rows == [("zoo", "say:What is it?", "What")] * 3
    assert (tmp_path / "out" / "street.zoo-say-What-is-it.webm").stat().st_size > 0


def test_an_adapter_unloaded_during_a_run_leaves_the_others(client: Client, tmp_path: Path) -> None:
    source = file_source(write_video(tmp_path / "street.mp4", shades(40)))
    client.load_adapter("brief", write_adapter(tmp_path / "brief", {"kind": 1}))
    results: list[ChunkResult] = []

    def on_result(result: ChunkResult) -> None:
        if not results:
            client.unload_adapter("brief")
        results.append(result)

    run(client, [source], (), ("cam/one", "brief/kind"), on_result=on_result)
    assert [each.label for each in results if each.head == "one"] == labels(40)
    problems = [each.problem or "" for each in results if each.head == "kind"]
    assert problems[0] == "" and problems[-1].startswith("no adapter named 'brief'")


@pytest.mark.parametrize(
    ("adapters", "heads", "why"),
    [
        (
            ("cam", "zoo"),
            ("night",),
            "several of the adapters have a head 'night'; write --head cam/night or --head zoo/night",
        ),
        (("cam",), ("night", "cam/night"), "head 'night' of adapter 'cam' is given more than once"),
        (("nowhere", "cam"), ("night",), "no adapter named 'nowhere'; registered: cam, zoo"),
        ((), ("nowhere/night",), "no adapter named 'nowhere'"),
        ((), ("cam/nowhere",), "adapter 'cam' has no head 'nowhere'; its heads: night"),
        ((), ("night",), "also give its --adapter, or write ADAPTER/HEAD"),
        ((), (), "nothing is asked"),
    ],
)
def test_heads_that_cannot_be_found(adapters: Sequence[str], heads: Sequence[str], why: str) -> None:
    with running_server({"cam": {"night": 1}, "zoo": {"night": 1}}) as running, Client(port=running.port) as client:
        with pytest.raises(BadRequest, match=why):
            find_groups(client, adapters, heads)
        (group,) = find_groups(client, ("cam",), ("zoo/night", "night"), ("what ?",))
        assert group.heads == [("zoo", "night"), ("cam", "night")]
        assert group.questions == [TextQuestion("what ?", "cam")]


def test_heads_with_the_same_file_name_get_numbers(tmp_path: Path) -> None:
    source = file_source(write_video(tmp_path / "street.mp4", shades(2)))
    with running_server() as running:
        folder = write_adapter(tmp_path / "adapter", {"a b": 1, "a/b": 1, "a-b-2": 1})
        running.on_loop(running.front_end.adapters.load("cam", folder))
        with Client(port=running.port) as client:
            counts = run(client, [source], "cam", ("a b", "a/b", "a-b-2"))
    assert counts == {"street.a-b": 2, "street.a-b-2": 2, "street.a-b-2-2": 2}


def test_a_head_that_ends_is_reported_while_the_others_go_on(client: Client, tmp_path: Path) -> None:
    camera = file_source(write_video(tmp_path / "street.mp4", shades(2)))._replace(kind="live")
    (tmp_path / "out" / "street.night.jsonl").mkdir(parents=True)
    stop = threading.Event()
    reported: list[str] = []

    def say(text: str) -> None:
        if "ended" in text and not stop.is_set():
            reported.append(text)
            stop.set()

    limit = threading.Timer(10, stop.set)  # the camera continues without end
    limit.start()
    with pytest.raises(BadConfig):
        run(client, [camera], "cam", ("night", "one"), out=tmp_path / "out", stop=stop, say=say)
    limit.cancel()
    assert len(reported) == 1 and reported[0].startswith("street.night ended: cannot write ")


def test_a_source_that_cannot_be_read_is_reported_once_for_all_heads(client: Client, tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    sources = [file_source(tmp_path / "bad.mp4"), file_source(write_video(tmp_path / "good.mp4", shades(1)))]
    lines: list[str] = []
    with pytest.raises(BadImage):
        run(client, sources, "cam", ("night", "one"), say=lines.append)
    assert len(lines) == 1 and lines[0].startswith("bad ended: cannot read video")


def test_an_unknown_head_is_refused_before_reading(client: Client, tmp_path: Path) -> None:
    source = file_source(write_video(tmp_path / "street.mp4", shades(1)))
    with pytest.raises(UnknownHead, match="has no head 'day'; its heads: night, one"):
        run(client, [source], "cam", ("night", "day"))
