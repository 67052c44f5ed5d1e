"""Sources to answers over a scripted server: every second once, in order, for each head, despite failures; files."""

from __future__ import annotations

import csv
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import pytest

from apps.video_analytics import Chunk, ChunkResult, Source, analyse, find_sources, run
from apps.video_analytics.asked import find_groups
from tests.apps.scripted import file_source, labels
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from tests.video_files import shades, write_video
from vlora.client import Client, FrameStream, TextQuestion
from vlora.client.connection import ServerConnection
from vlora.errors import (
    BadConfig,
    BadImage,
    BadRequest,
    Disconnected,
    OverCapacity,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
)
from vlora.opencv import quiet
from vlora.run_folder import NotWritten

CAMERA = Source("camera-0", "0", "live")
FILES = ("jsonl", "csv", "webm")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 2, "one": 1}, "zoo": {"night": 1, "kind": 1}}) as running:
        yield running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.video_analytics.answers.PAUSE_S", 0.02)
    monkeypatch.setattr("vlora.client.frame_stream.RETRY_S", 0.2)
    monkeypatch.setattr(sys.modules["vlora.client.sync"], "PAUSE_S", 0.01)


def video(folder: Path, seconds: int, name: str = "street", **settings: Any) -> Source:
    return file_source(write_video(folder / f"{name}.mp4", shades(seconds), **settings))


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- answers ----------------------------------------------------------------------------------------------------------


def test_pictures_that_cannot_be_decoded_are_skipped(client: Client, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for place in range(33):
        data = b"no picture" if place < 30 or place == 31 else png(230)
        (tmp_path / "pictures" / f"{place:02}.png").write_bytes(data)
    results: list[ChunkResult] = []
    source, out = file_source(tmp_path / "pictures"), tmp_path / "out"
    counts = run(client, [source], "cam", ("night", "one"), out=out, on_result=results.append)
    assert counts == {"pictures.night": 1, "pictures.one": 2}
    one = [result for result in results if result.head == "one"]
    assert [(result.index, result.label) for result in one if result.problem is None] == [
        (30, "bright"),
        (32, "bright"),
    ]
    assert [result.index for result in one] == list(range(33)), "each picture has its result, in order"
    undecodable = "is not a picture that this machine can decode"
    assert one[31].problem == f"'{tmp_path}/pictures/31.png' {undecodable}"
    assert len(rows_of(out / "pictures.one.jsonl")) == 33
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no picture")
    results.clear()
    with pytest.raises(BadImage, match=r"' contains no picture that can be decoded$"):
        run(client, [file_source(tmp_path / "bad")], "cam", "night", on_result=results.append)
    assert [(result.problem or "").partition("a.png' ")[2] for result in results] == [undecodable]


def test_a_broken_connection_and_a_lost_stream_lose_no_second(client: Client, server: Running, tmp_path: Path) -> None:
    lines: list[str] = []
    found: list[ChunkResult] = []
    for _, result in analyse(client, video(tmp_path, 12), "cam", "night", say=lines.append):
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


def test_a_server_that_stays_away_is_given_up_by_files_and_awaited_by_cameras(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(port=server.port) as client:
        answers = analyse(client, video(tmp_path, 30), "cam", "night", patience_s=0.2)
        next(answers)
        connection = client.connection()
        monkeypatch.setattr(client, "connection", unreachable)
        connection.close()
        with pytest.raises(Disconnected):
            list(answers)

    def frames(source: Source, shapes: object, *, stop: threading.Event, **_: object) -> Iterator[tuple[int, Chunk]]:
        while not stop.wait(0.01):
            yield 0, Chunk(0, 0.0, (png(), png()))

    monkeypatch.setattr("apps.video_analytics.source_reader.read_clips", frames)
    monkeypatch.setattr("vlora.client.frame_stream.RETRY_S", 0.05)
    stop, lines, tries = threading.Event(), list[str](), list[None]()
    with Client(port=server.port) as client:
        answers = analyse(client, CAMERA, "cam", "night", stop=stop, say=lines.append, patience_s=0.0)
        assert next(answers)[1].label == "bright"
        connection, open_stream = client.connection(), client.open_stream
        monkeypatch.setattr(client, "connection", unreachable)

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


def test_a_server_that_is_not_there_yet_is_waited_for(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, answered_stats = [video(tmp_path, 2)], client.stats
    tries, lines, stopped = list[int](), list[str](), threading.Event()

    def stats() -> Any:
        tries.append(len(tries))
        if len(tries) < 4:
            raise Disconnected("no server")
        return answered_stats()

    monkeypatch.setattr(client, "stats", stats)
    with pytest.raises(Disconnected):
        run(client, sources, "cam", "night", say=lines.append)
    assert len(tries) == 1 and not lines
    stopped.set()
    with pytest.raises(Disconnected):
        run(client, sources, "cam", "night", wait_s=60, stop=stopped)
    assert len(tries) == 2
    assert run(client, sources, "cam", "night", wait_s=60, say=lines.append) == {"street": 2}
    assert lines == ["no server; waiting for it"]


@pytest.mark.parametrize("lost", [UnknownAdapter("not loaded"), UnknownHead("not there"), OverCapacity("full")])
def test_a_server_that_returned_without_the_adapter_is_retried(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: VLoraError
) -> None:
    open_stream, tries, lines = client.open_stream, list[None](), list[str]()

    def opened(**options: object) -> FrameStream:
        tries.append(None)
        if len(tries) < 4:
            raise lost
        return open_stream(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "open_stream", opened)
    source = video(tmp_path, 3)
    assert [pair[1].label for pair in analyse(client, source, "cam", "night", say=lines.append)] == labels(3)
    assert lines == [f"street: {lost}; retrying"]
    tries.clear()
    with pytest.raises(type(lost)):
        list(analyse(client, source, "cam", "night", patience_s=0.0))


@pytest.mark.parametrize("code", [OverCapacity, UnknownAdapter])
def test_seconds_refused_by_a_server_that_shuts_down_are_sent_again(
    client: Client, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: type[VLoraError]
) -> None:
    attempts, lines, ask_head = list[None](), list[str](), server.front_end.ask_head

    async def refuse(*args: Any, **options: Any) -> Any:
        attempts.append(None)
        if 3 <= len(attempts) <= 9:
            raise code("not now")
        return await ask_head(*args, **options)

    monkeypatch.setattr(server.front_end, "ask_head", refuse)
    pairs = list(analyse(client, video(tmp_path, 9), "cam", "night", say=lines.append))
    assert [result.label for _, result in pairs] == labels(9) and not any(result.problem for _, result in pairs)
    assert set(lines) == {"street: not now; retrying"}


def test_seconds_of_a_camera_that_are_replaced_have_a_result(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(*_: object, **__: object) -> Iterator[tuple[int, Chunk]]:
        for index in range(100):
            yield 0, Chunk(index, float(index), (png(), png()))

    monkeypatch.setattr("apps.video_analytics.source_reader.read_clips", frames)
    results = [result for _, result in analyse(client, CAMERA, "cam", "night")]
    assert [result.index for result in results] == sorted(result.index for result in results)
    gaps = [result for result in results if result.problem is not None and "replaced" in result.problem]
    following = [results[results.index(gap) + 1].index for gap in gaps]
    missing = sum(after - gap.index for gap, after in zip(gaps, following, strict=True))
    assert gaps and len(results) - len(gaps) + missing == 100, "each clip has a result, or is counted in one"
    assert all(gap.label == "" and gap.answer is None and gap.start_s == gap.index for gap in gaps)


# -- heads and questions ----------------------------------------------------------------------------------------------


def test_heads_and_questions_about_one_frame_share_its_transfer(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, sent, send = list[ChunkResult](), list[int](), FrameStream.send

    def counting(stream: FrameStream, *images: Any) -> int:
        sent.append(len(images))
        return send(stream, *images)

    monkeypatch.setattr(FrameStream, "send", counting)
    asked: dict[str, Any] = {"questions": ("say:What is it?",), "max_tokens": 4, "out": tmp_path / "out"}
    heads, source = ("cam/one", "kind", "cam/night"), video(tmp_path, 3)
    counts = run(client, [source], ("cam", "zoo"), heads, on_result=results.append, **asked)
    names = ["cam-one", "zoo-kind", "cam-say-What-is-it", "zoo-say-What-is-it", "cam-night"]
    assert counts == {f"street.{name}": 3 for name in names}
    assert sorted(sent) == [1, 1, 1, 2, 2, 2], "one frame for four answers, and two for the head that reads two"
    assert {(each.adapter, each.head, each.question, each.label) for each in results if each.index == 1} == {
        *(("cam", "one", "", "dark"), ("zoo", "kind", "", "dark"), ("cam", "night", "", "dark")),
        *((adapter, "", "say:What is it?", "What") for adapter in ("cam", "zoo")),
    }
    assert all((each.text is None) == bool(each.head) and each.problem is None for each in results)
    rows = table_of(tmp_path / "out" / "street.zoo-say-What-is-it.csv")
    found = [(row["adapter"], row["question"], row["label"]) for row in rows]
    assert found == [("zoo", "say:What is it?", "What")] * 3
    assert (tmp_path / "out" / "street.zoo-say-What-is-it.webm").stat().st_size > 0


def test_an_adapter_unloaded_during_a_run_leaves_the_others(client: Client, tmp_path: Path) -> None:
    client.load_adapter("brief", write_adapter(tmp_path / "brief", {"kind": 1}))
    results: list[ChunkResult] = []

    def on_result(result: ChunkResult) -> None:
        if not results:
            client.unload_adapter("brief")
        results.append(result)

    run(client, [video(tmp_path, 40)], (), ("cam/one", "brief/kind"), on_result=on_result)
    assert [each.label for each in results if each.head == "one"] == labels(40)
    problems = [each.problem or "" for each in results if each.head == "kind"]
    assert problems[0] == "" and problems[-1].startswith("no adapter named 'brief'")


WRONG: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("cam", "zoo"), ("night",), "several of the adapters have a head 'night'; write --head cam/night or --head zoo/"),
    (("cam",), ("night", "cam/night"), "head 'night' of adapter 'cam' is given more than once"),
    (("nowhere", "cam"), ("night",), "no adapter named 'nowhere'; registered: cam, zoo"),
    ((), ("nowhere/night",), "no adapter named 'nowhere'"),
    ((), ("cam/nowhere",), "adapter 'cam' has no head 'nowhere'; its heads: night"),
    ((), ("night",), "also give its --adapter, or write ADAPTER/HEAD"),
    ((), (), "nothing is asked"),
)


def test_heads_are_found_by_name_and_their_files_have_different_names(client: Client, tmp_path: Path) -> None:
    for adapters, heads, why in WRONG:
        with pytest.raises(BadRequest, match=why):
            find_groups(client, adapters, heads)
    with pytest.raises(UnknownHead, match="has no head 'day'; its heads: night, one"):
        run(client, [Source("unread", "nowhere.mp4", "file")], "cam", ("night", "day"))
    with pytest.raises(UnknownHead, match="has no head 'day'"):
        next(analyse(client, CAMERA, "cam", "day"))
    (group, *_) = find_groups(client, ("cam",), ("zoo/night", "one"), ("what ?",))
    assert group.heads == [("zoo", "night"), ("cam", "one")] and group.questions == [TextQuestion("what ?", "cam")]
    client.load_adapter("same", write_adapter(tmp_path / "adapter", {"a b": 1, "a/b": 1, "a-b-2": 1}))
    counts = run(client, [video(tmp_path, 2)], "same", ("a b", "a/b", "a-b-2"))
    assert counts == {"street.a-b": 2, "street.a-b-2": 2, "street.a-b-2-2": 2}
    client.unload_adapter("same")


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_head_that_ends_is_reported_while_the_others_go_on(client: Client, tmp_path: Path) -> None:
    camera = video(tmp_path, 2)._replace(kind="live")
    (tmp_path / "out" / "street.night.jsonl").mkdir(parents=True)
    stop, reported = threading.Event(), list[str]()

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


def test_a_source_that_fails_is_one_line_and_does_not_end_the_others(client: Client, tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    sources, out = [file_source(tmp_path / "bad.mp4"), video(tmp_path, 8, "good")], tmp_path / "out"
    lines: list[str] = []
    results: list[ChunkResult] = []
    for heads, kind in (("night", "night"), (("night", "one"), "good.one")):
        lines.clear()
        with pytest.raises(BadImage, match=r"bad\.mp4"):
            run(client, sources, "cam", heads, out=out / kind, say=lines.append)
        assert len(lines) == 1 and lines[0].startswith("bad ended: cannot read video"), "once for all heads"
    assert len(rows_of(out / "night" / "good.jsonl")) == 8

    def on_result(result: ChunkResult) -> None:
        if result.source == "bad":
            raise ZeroDivisionError("division\n by zero")
        results.append(result)

    sources[0] = video(tmp_path, 8, "bad")
    lines.clear()
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


# -- files ------------------------------------------------------------------------------------------------------------


def test_each_source_and_head_has_its_rows_table_and_video(client: Client, tmp_path: Path) -> None:
    sources = [video(tmp_path, number + 2, name, size=(65, 49)) for number, name in enumerate(("v0", "=1+1"))]
    out, counts = tmp_path / "results", {"v0.night": 2, "v0.one": 4, "=1+1.night": 3, "=1+1.one": 6}
    assert run(client, sources, "cam", ("night", "one"), fps=2, out=out) == counts
    assert {file.name for file in out.iterdir()} == {f"{name}.{kind}" for name in counts for kind in FILES}
    for name, count in counts.items():
        (source, head), rows, table = name.split("."), rows_of(out / f"{name}.jsonl"), table_of(out / f"{name}.csv")
        times = 2 if head == "one" else 1  # per second
        assert [row["label"] for row in rows] == [label for label in labels(count // times) for _ in range(times)]
        assert [row["start_s"] for row in rows] == [index / times for index in range(count)]
        assert all(row["answer"]["scores"] and row["problem"] is None and row["head"] == head for row in rows)
        assert [(row["label"], row["head"]) for row in table] == [(row["label"], head) for row in rows]
        assert {row["source"] for row in table} == {"'=1+1" if source == "=1+1" else source}, "no formula"
        capture = cv2.VideoCapture(str(out / f"{name}.webm"))
        frames = []
        while (read := capture.read())[0]:
            frames.append(read[1])
        assert len(frames) == 10 * count // times and capture.get(cv2.CAP_PROP_FPS) == 10
        assert frames[5][:100].mean() > 200 > 60 > frames[15][:100].mean() and frames[5][-48:].max() > 200


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_file_that_cannot_be_written_is_named(client: Client, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "taken" / f"street.{suffix}").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / f"street.{suffix}").symlink_to("/dev/full")  # a full disk
    for folder, kind, why in (("taken", BadConfig, "Is a directory"), ("full", NotWritten, "No space left")):
        with pytest.raises(kind, match=rf"cannot write '.*street\.{suffix}': {why}"):
            run(client, [video(tmp_path, 3)], "cam", "night", out=tmp_path / folder)


@pytest.mark.slow
def test_after_stop_read_clips_are_answered_and_files_are_complete(client: Client, tmp_path: Path) -> None:
    stop, seen, out = threading.Event(), list[ChunkResult](), tmp_path / "out"

    def on_result(result: ChunkResult) -> None:
        seen.append(result)
        if len(seen) == 5:
            stop.set()

    counts = run(client, [video(tmp_path, 300)], "cam", "night", out=out, stop=stop, on_result=on_result)
    assert 5 <= counts["street"] < 40 and [result.index for result in seen] == list(range(len(seen)))
    assert [row["index"] for row in rows_of(out / "street.jsonl")] == list(range(counts["street"]))
    assert cv2.VideoCapture(str(out / "street.webm")).read()[0]
