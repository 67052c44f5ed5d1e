"""Sources to answers over a scripted server: every second once, in order, despite failures."""

from __future__ import annotations

import csv
import json
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from apps.video_analytics import Chunk, ChunkResult, ClipShape, Source, analyse, find_sources, read_clips, run
from apps.video_analytics import sources as sources_module
from apps.video_analytics.sources import read_picture
from tests.apps.folders import refuse_to_list
from tests.server.running import Running, png, running_server
from tests.video_files import shades, write_video
from vlora.client import Client, FrameStream
from vlora.client.connection import ServerConnection
from vlora.config import ServerConfig
from vlora.errors import (
    BadConfig,
    BadImage,
    Disconnected,
    OverCapacity,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
)
from vlora.opencv import quiet
from vlora.server.media.image_decoding import decode_images
from vlora.types import EngineStats

BRIGHT = "bright"


@pytest.fixture
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 2, "one": 1}}) as running:
        yield running


def labels(count: int) -> list[str]:
    return ["dark" if place % 3 else BRIGHT for place in range(count)]


def file_source(path: Path) -> Source:
    (source,) = find_sources([str(path)])
    return source


def clips_of(source: Source, num_frames: int, fps: float | None = None, **options: Any) -> Iterator[Chunk]:
    """A source's clips for one head."""
    return (clip for _, clip in read_clips(source, [ClipShape(num_frames, fps)], **options))


# -- sources ----------------------------------------------------------------------------------------------------------


def test_addresses_become_sources_with_unique_names(tmp_path: Path) -> None:
    for name in ("b.mp4", "a.MP4", "notes.txt", "c.png"):
        (tmp_path / name).write_bytes(b"")
    found = find_sources(
        ["0", "rtsp://user:secret@camera-7:554/main?x=1", "x/street.mp4", "y/street.mp4", str(tmp_path)]
    )
    assert [(source.name, source.kind) for source in found] == [
        ("camera-0", "live"),
        ("camera-7-554-main-x-1", "live"),
        ("street", "file"),
        ("street-2", "file"),
        ("a", "file"),
        ("b", "file"),
        (tmp_path.name, "pictures"),
    ]
    (tmp_path / "gate" / "old").mkdir(parents=True)
    (tmp_path / "gate" / "a.events").mkdir()
    results = ("a.jsonl", "a.webm", "a.events.jsonl", "a.events/0001-car.jpg")  # of an earlier run
    for name in ("a.mp4", "old/a.mp4", "old/1.png", *results):
        (tmp_path / "gate" / name).write_bytes(b"")
    assert [source.name for source in find_sources([str(tmp_path), str(tmp_path / "gate" / "a.mp4")])] == [
        *("a", "b", "gate-a", "gate-old-a", tmp_path.name, "gate-old", "a-2"),
    ]
    with pytest.raises(BadImage, match="contains results of `vlora stream` only"):
        find_sources([str(tmp_path / "gate" / "a.events")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadImage, match="contains no video and no picture"):
        find_sources([str(tmp_path / "empty")])


def test_a_cameras_password_is_in_no_message() -> None:
    (source,) = find_sources(["http://user:secret@127.0.0.1:9/main?user=u&Password=secret&channel=1&pwd=secret"])
    assert source.name == "127-0-0-1-9-main-user-u-channel-1"
    with pytest.raises(BadImage, match=r"'http://127\.0\.0\.1:9/main\?user=u&channel=1'"):
        list(clips_of(source, 1))


def test_a_folders_pictures_are_chunks_of_as_many_as_the_head_reads(tmp_path: Path) -> None:
    for place in range(5):
        (tmp_path / f"{place}.png").write_bytes(png(50 * place))
    (source,) = find_sources([str(tmp_path)])
    chunks = list(clips_of(source, 2, shown=True))
    assert [len(chunk.frames) for chunk in chunks] == [2, 2, 2] == [len(chunk.shown) for chunk in chunks]
    assert chunks[2].frames[0] == chunks[2].frames[1]  # the last is repeated


def test_a_picture_that_cannot_be_decoded_is_skipped(client: Client, tmp_path: Path) -> None:
    for place in range(33):
        (tmp_path / f"{place:02}.png").write_bytes(b"no picture" if place < 30 or place == 31 else png(230))
    source = file_source(tmp_path)
    assert [clip.problem is None for clip in clips_of(source, 2)] == [False] * 31 + [True]
    results: list[ChunkResult] = []
    counts = run(client, [source], "cam", ("night", "one"), out=tmp_path / "out", on_result=results.append)
    assert counts == {f"{source.name}.night": 1, f"{source.name}.one": 2}
    one = [result for result in results if result.head == "one"]
    assert [(result.index, result.label) for result in one if result.problem is None] == [(30, BRIGHT), (32, BRIGHT)]
    assert [result.index for result in one] == list(range(33)), "each picture has its result, in order"
    assert one[31].problem == f"'{tmp_path}/31.png' is not a picture that this machine can decode"
    assert len((tmp_path / "out" / f"{source.name}.one.jsonl").read_text().splitlines()) == 33


def test_a_folder_without_a_good_picture_is_an_error(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    results: list[ChunkResult] = []
    with pytest.raises(BadImage, match=r"' contains no picture that can be decoded$"):
        run(client, [file_source(tmp_path)], "cam", "night", on_result=results.append)
    (result,) = results
    assert result.problem is not None and result.problem.endswith(
        "a.png' is not a picture that this machine can decode"
    )


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("99", "no camera has that number"),
        ("20240101120000", "no camera has that number"),
        ("rtsp://127.0.0.1:1/main", "the address does not respond"),
        ("nowhere.mp4", "no such file or address"),
        ("nowhere.png", "'nowhere.png' does not exist"),
        (__file__, "not a video that this machine can decode"),
    ],
)
def test_errors_name_why_a_source_cannot_be_read(address: str, why: str) -> None:
    with pytest.raises(BadImage, match=why):
        next(clips_of(find_sources([address])[0], 1))


def test_a_number_that_names_a_file_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "20240101120000").mkdir()
    with pytest.raises(BadImage, match=r"; write \./20240101120000 for the file or folder$"):
        next(clips_of(find_sources(["20240101120000"])[0], 1))


def test_a_picture_above_opencvs_limits_is_an_error(tmp_path: Path) -> None:
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(BadImage, match=r"huge\.png': OpenCV requires pixels <= \w+$"):
        read_picture(tmp_path / "huge.png")


@pytest.mark.parametrize("kind", ["RGBA.png", "RGBA.webp", "RGBA.tif", "LA.png", "P.png", "I;16.png", "I;16.tif"])
def test_pictures_have_the_pixels_that_the_server_decodes(tmp_path: Path, kind: str) -> None:
    mode, _, suffix = kind.partition(".")
    image = Image.new("RGBA", (8, 4), (200, 100, 50, 0))
    for place, alpha in enumerate((255, 128, 1)):
        image.putpixel((place, 0), (90, 60, 30, alpha))
    if mode == "I;16":
        image = Image.fromarray(np.linspace(0, 65535, 32).reshape(4, 8).astype(np.uint16))
    elif mode == "P":
        image = image.quantize(8)
    options: dict[str, Any] = {"lossless": True, "exact": True} if suffix == "webp" else {}
    (image if mode in ("P", "I;16") else image.convert(mode)).save(tmp_path / f"a.{suffix}", **options)
    (served,) = decode_images([(tmp_path / f"a.{suffix}").read_bytes()], ServerConfig())
    read = read_picture(tmp_path / f"a.{suffix}")[..., ::-1].astype(int)
    assert np.abs(read - np.asarray(served)).max() <= 1


def test_pictures_that_opencv_would_show_wrongly_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)).save(tmp_path / "a.tif")
    with pytest.raises(BadImage, match=r"a\.tif' has samples of type float32; convert it to 8 or 16 bits"):
        read_picture(tmp_path / "a.tif")
    exif = Image.Exif()
    exif[0x0112] = 3
    image = Image.new("RGBA", (8, 4), (200, 100, 50, 0))
    image.putpixel((0, 0), (0, 0, 0, 255))
    image.save(tmp_path / "a.png", exif=exif)
    with pytest.raises(BadImage, match=r"a\.png' is transparent and rotated by EXIF; save it upright"):
        read_picture(tmp_path / "a.png")


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_list(tmp_path, monkeypatch)
    with pytest.raises(BadImage, match=r"cannot read folder '.*': Permission denied$"):
        find_sources([str(tmp_path)])


def test_a_file_name_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    """OpenCV aborts the process for such a name."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for path in (tmp_path / "\udcff.mp4", folder / "\udcff.png"):
        path.write_bytes(png())
    with pytest.raises(BadImage, match="its name is not UTF-8; rename it"):
        next(clips_of(find_sources([str(tmp_path)])[0], 1))
    folder = folder.rename(tmp_path.parent / "only pictures")
    problem = next(clips_of(file_source(folder), 1)).problem
    assert problem is not None and problem.endswith("its name is not UTF-8; rename it")


def test_a_camera_that_is_lost_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    lines: list[str] = []
    opened: list[float] = []

    def read(*_: object) -> Iterator[tuple[int, Chunk]]:
        opened.append(time.monotonic())
        if len(opened) == 2:
            raise BadImage("cannot read video")
        yield 0, Chunk(0, 0.0, (b"frame",))
        yield 0, Chunk(1, 1.0, (b"frame",))

    monkeypatch.setattr(sources_module, "read_video", read)
    monkeypatch.setattr(sources_module, "FIRST_PAUSE_S", 0.01)
    chunks = clips_of(Source("camera-0", "0", "live"), 1, stop=stop, say=lines.append)
    assert [next(chunks).index for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    stop.set()
    assert list(chunks) == [] and len(opened) == 4
    assert lines[0].startswith("camera-0: the camera sends no more frames; retrying")
    assert lines[1].startswith("camera-0: cannot read video; retrying")


def test_a_camera_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[None] = []

    def read(*_: object) -> Iterator[tuple[int, Chunk]]:
        opened.append(None)
        if len(opened) <= 3:
            raise BadImage("cannot read video")
        yield 0, Chunk(0, 0.0, (b"frame",))

    monkeypatch.setattr(sources_module, "read_video", read)
    monkeypatch.setattr(sources_module, "FIRST_PAUSE_S", 0.01)
    camera = Source("camera-0", "0", "live")
    with pytest.raises(BadImage):
        next(clips_of(camera, 1))
    with pytest.raises(BadImage):
        next(clips_of(Source("street", "street.mp4", "file"), 1, wait_s=60))
    assert len(opened) == 2 and next(clips_of(camera, 1, wait_s=60)).index == 0


# -- answers ----------------------------------------------------------------------------------------------------------


def test_every_second_is_answered_once_and_in_order(client: Client, tmp_path: Path) -> None:
    video = write_video(tmp_path / "street.mp4", shades(9))
    pairs = list(analyse(client, file_source(video), "cam", "night"))
    assert [result.label for _, result in pairs] == labels(9)
    assert [(chunk.index, result.index, result.start_s) for chunk, result in pairs] == [
        (n, n, float(n)) for n in range(9)
    ]
    with pytest.raises(UnknownHead, match="has no head 'day'"):
        next(analyse(client, file_source(video), "cam", "day"))


def test_a_broken_connection_and_a_lost_stream_lose_no_second(
    client: Client, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apps.video_analytics.answers.PAUSE_S", 0.05)
    lines: list[str] = []
    found: list[ChunkResult] = []
    video = write_video(tmp_path / "street.mp4", shades(12))
    for _, result in analyse(client, file_source(video), "cam", "night", say=lines.append):
        found.append(result)
        if len(found) == 3:
            client.connection().close()
        if len(found) == 6:  # as after a restart of the server: the stream is unknown
            server.loop.call_soon_threadsafe(server.front_end.streams.close)
    assert [result.index for result in found] == list(range(12))
    assert [result.label for result in found] == labels(12)
    assert any("no stream" in text or "closed" in text for text in lines)


def unreachable() -> ServerConnection:
    raise Disconnected("cannot reach a server")


def test_a_server_that_stays_away_is_given_up(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.video_analytics.answers.PAUSE_S", 0.05)
    monkeypatch.setattr("vlora.client.frame_stream.RETRY_S", 0.2)
    video = write_video(tmp_path / "street.mp4", shades(30))
    with Client(port=server.port) as client:
        answers = analyse(client, file_source(video), "cam", "night", patience_s=0.2)
        next(answers)
        connection = client.connection()
        monkeypatch.setattr(client, "connection", unreachable)
        connection.close()
        with pytest.raises(Disconnected):
            list(answers)


def test_a_server_that_is_not_there_yet_is_waited_for(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vlora.client.sync"], "PAUSE_S", 0.01)
    sources = [file_source(write_video(tmp_path / "street.mp4", shades(2)))]
    answered_stats = client.stats
    tries: list[int] = []

    def stats() -> EngineStats:
        tries.append(len(tries))
        if len(tries) < 4:
            raise Disconnected("no server")
        return answered_stats()

    monkeypatch.setattr(client, "stats", stats)
    lines: list[str] = []
    with pytest.raises(Disconnected):
        run(client, sources, "cam", "night", say=lines.append)
    assert len(tries) == 1 and not lines
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Disconnected):
        run(client, sources, "cam", "night", wait_s=60, stop=stopped)
    assert len(tries) == 2
    assert run(client, sources, "cam", "night", wait_s=60, say=lines.append) == {"street": 2}
    assert lines == ["no server; waiting for it"]


def test_a_camera_waits_for_its_server_until_stop_is_set(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.video_analytics.answers.PAUSE_S", 0.02)
    monkeypatch.setattr("vlora.client.frame_stream.RETRY_S", 0.05)

    def frames(source: Source, shapes: object, *, stop: threading.Event, **_: object) -> Iterator[tuple[int, Chunk]]:
        while not stop.wait(0.01):
            yield 0, Chunk(0, 0.0, (png(), png()))

    monkeypatch.setattr("apps.video_analytics.source_reader.read_clips", frames)
    stop = threading.Event()
    lines: list[str] = []
    tries: list[None] = []

    with Client(port=server.port) as client:
        camera = Source("camera-0", "0", "live")
        answers = analyse(client, camera, "cam", "night", stop=stop, say=lines.append, patience_s=0.0)
        assert next(answers)[1].label == "bright"
        connection = client.connection()
        monkeypatch.setattr(client, "connection", unreachable)
        open_stream = client.open_stream

        def counted(**options: object) -> FrameStream:
            tries.append(None)
            if len(tries) == 10:
                stop.set()
            return open_stream(**options)  # type: ignore[arg-type]

        monkeypatch.setattr(client, "open_stream", counted)
        connection.close()
        with pytest.raises(Disconnected):
            list(answers)
    assert len(tries) == 10 and 1 <= len(lines) == len(set(lines)) <= 2, "a permanent problem is reported once"


@pytest.mark.parametrize("lost", [UnknownAdapter("not loaded"), UnknownHead("not there"), OverCapacity("full")])
def test_a_server_that_returned_without_the_adapter_is_retried(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: VLoraError
) -> None:
    monkeypatch.setattr("apps.video_analytics.answers.PAUSE_S", 0.02)
    open_stream = client.open_stream
    tries: list[None] = []

    def opened(**options: object) -> FrameStream:
        tries.append(None)
        if len(tries) < 4:
            raise lost
        return open_stream(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "open_stream", opened)
    lines: list[str] = []
    video = file_source(write_video(tmp_path / "street.mp4", shades(3)))
    assert [pair[1].label for pair in analyse(client, video, "cam", "night", say=lines.append)] == labels(3)
    assert lines == [f"street: {lost}; retrying"]
    tries.clear()
    with pytest.raises(type(lost)):
        list(analyse(client, video, "cam", "night", patience_s=0.0))


@pytest.mark.parametrize("code", [OverCapacity, UnknownAdapter])
def test_seconds_refused_by_a_server_that_shuts_down_are_sent_again(
    client: Client, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: type[VLoraError]
) -> None:
    monkeypatch.setattr("apps.video_analytics.answers.PAUSE_S", 0.02)
    front_end = server.front_end
    attempts: list[None] = []
    ask_head = front_end.ask_head

    async def refuse(*args: Any, **options: Any) -> Any:
        attempts.append(None)
        if 3 <= len(attempts) <= 9:
            raise code("not now")
        return await ask_head(*args, **options)

    monkeypatch.setattr(front_end, "ask_head", refuse)
    lines: list[str] = []
    video = file_source(write_video(tmp_path / "street.mp4", shades(9)))
    pairs = list(analyse(client, video, "cam", "night", say=lines.append))
    assert [result.label for _, result in pairs] == labels(9) and not any(result.problem for _, result in pairs)
    assert set(lines) == {"street: not now; retrying"}


def test_seconds_of_a_camera_that_are_replaced_have_a_result(
    client: Client, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frames(*_: object, **__: object) -> Iterator[tuple[int, Chunk]]:
        for index in range(100):
            yield 0, Chunk(index, float(index), (png(), png()))

    monkeypatch.setattr("apps.video_analytics.source_reader.read_clips", frames)
    results = [result for _, result in analyse(client, Source("camera-0", "0", "live"), "cam", "night")]
    assert [result.index for result in results] == sorted(result.index for result in results)
    gaps = [result for result in results if result.problem is not None and "replaced" in result.problem]
    following = [results[results.index(gap) + 1].index for gap in gaps]
    missing = sum(after - gap.index for gap, after in zip(gaps, following, strict=True))
    assert gaps and len(results) - len(gaps) + missing == 100, "each clip has a result, or is counted in one"
    assert all(gap.label == "" and gap.answer is None and gap.start_s == gap.index for gap in gaps)


# -- files ------------------------------------------------------------------------------------------------------------


def test_many_sources_write_their_files_in_parallel(client: Client, tmp_path: Path) -> None:
    sources = find_sources([str(write_video(tmp_path / f"v{n}.mp4", shades(n + 2), size=(65, 49))) for n in range(3)])
    out = tmp_path / "results"
    assert run(client, sources, "cam", "night", out=out) == {"v0": 2, "v1": 3, "v2": 4}
    for number in range(3):
        lines = [json.loads(line) for line in (out / f"v{number}.jsonl").read_text().splitlines()]
        assert [line["label"] for line in lines] == labels(number + 2)
        assert all(line["answer"]["scores"] and line["problem"] is None for line in lines)
        with (out / f"v{number}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["label"] for row in rows] == labels(number + 2) and rows[0]["source"] == f"v{number}"
        capture = cv2.VideoCapture(str(out / f"v{number}.webm"))
        frames = []
        while (read := capture.read())[0]:
            frames.append(read[1])
        assert len(frames) == 10 * (number + 2) and capture.get(cv2.CAP_PROP_FPS) == 10
        assert frames[5][:100].mean() > 200 > 60 > frames[15][:100].mean() and frames[5][-48:].max() > 200


def test_a_source_that_fails_does_not_end_the_others(client: Client, tmp_path: Path) -> None:
    good = write_video(tmp_path / "good.mp4", shades(4))
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    lines: list[str] = []
    with pytest.raises(BadImage, match=r"bad\.mp4"):
        run(
            client,
            find_sources([str(tmp_path / "bad.mp4"), str(good)]),
            "cam",
            "night",
            out=tmp_path / "out",
            say=lines.append,
        )
    assert len((tmp_path / "out" / "good.jsonl").read_text().splitlines()) == 4
    assert len(lines) == 1 and lines[0].startswith("bad ended: cannot read video")


def test_an_internal_error_ends_its_source_with_one_line(client: Client, tmp_path: Path) -> None:
    sources = [file_source(write_video(tmp_path / f"{name}.mp4", shades(8))) for name in ("bad", "good")]
    lines: list[str] = []
    results: list[ChunkResult] = []

    def on_result(result: ChunkResult) -> None:
        if result.source == "bad":
            raise ZeroDivisionError("division\n by zero")
        results.append(result)

    with pytest.raises(ZeroDivisionError):
        run(client, sources, "cam", "night", on_result=on_result, say=lines.append)
    assert lines == ["bad ended: internal error (ZeroDivisionError: division by zero)"]
    assert [result.label for result in results] == labels(8)
    lines.clear()
    with pytest.raises(ZeroDivisionError):
        run(client, sources[:1], "cam", ("night", "one"), on_result=on_result, say=lines.append)
    assert sorted(line.partition(":")[0] for line in lines) == ["bad.night ended", "bad.one ended"]


def test_messages_of_sources_appear_while_others_open_videos(
    client: Client, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hush() -> None:
        with quiet():
            inside.set()
            leave.wait(10)

    def say(text: str) -> None:
        os.write(2, f"{text}\n".encode())

    def analysed() -> None:
        with pytest.raises(BadImage):
            run(client, sources, "cam", "night", say=say)

    sources = find_sources([str(tmp_path / "a.mp4"), str(tmp_path / "b.mp4")])
    before = os.fstat(2)
    threads = [threading.Thread(target=target) for target in (hush, hush, analysed)]
    threads[0].start()
    assert inside.wait(10)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.3)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert os.path.samestat(os.fstat(2), before), "stderr is restored"
    assert [line[:7] for line in sorted(capfd.readouterr().err.splitlines())] == ["a ended", "b ended"]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_file_that_cannot_be_written_is_named(client: Client, tmp_path: Path, suffix: str) -> None:
    video = write_video(tmp_path / "street.mp4", shades(3))
    (tmp_path / "taken" / f"street.{suffix}").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / f"street.{suffix}").symlink_to("/dev/full")  # a full disk
    for folder, why in (("taken", "Is a directory"), ("full", "No space left")):
        with pytest.raises(BadConfig, match=rf"cannot write '.*street\.{suffix}': {why}"):
            run(client, [file_source(video)], "cam", "night", out=tmp_path / folder)


@pytest.mark.slow
def test_after_stop_read_clips_are_answered_and_files_are_complete(client: Client, tmp_path: Path) -> None:
    video = write_video(tmp_path / "long.mp4", shades(300))
    stop = threading.Event()
    seen: list[ChunkResult] = []

    def on_result(result: ChunkResult) -> None:
        seen.append(result)
        if len(seen) == 5:
            stop.set()

    counts = run(client, [file_source(video)], "cam", "night", out=tmp_path / "out", stop=stop, on_result=on_result)
    assert 5 <= counts["long"] < 40 and [result.index for result in seen] == list(range(len(seen)))
    lines = (tmp_path / "out" / "long.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(counts["long"]))
    assert cv2.VideoCapture(str(tmp_path / "out" / "long.webm")).read()[0]


def test_a_table_holds_no_formula(client: Client, tmp_path: Path) -> None:
    (tmp_path / "=1+1.mp4").write_bytes(write_video(tmp_path / "v.mp4", shades(2)).read_bytes())
    run(client, [file_source(tmp_path / "=1+1.mp4")], "cam", "night", out=tmp_path / "out")
    with (tmp_path / "out" / "=1+1.csv").open(newline="") as file:
        assert {row["source"] for row in csv.DictReader(file)} == {"'=1+1"}
