"""Streams of frames against a running server: both clients, broken connections, hostile peers, foreign tokens."""

from __future__ import annotations

import array
import asyncio
import contextlib
import functools
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.processes import PATIENCE_S, until
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from vlora.client import AsyncClient, Client, FrameStream, TextQuestion, frame_stream
from vlora.client.calling import Blocking
from vlora.client.frame_stream import AsyncFrameStream, ReconnectBackoff
from vlora.config import ServerConfig, Token
from vlora.errors import (
    BadImage,
    BadRequest,
    DeadlineMissed,
    Disconnected,
    TooLarge,
    UnknownAdapter,
    UnknownHead,
    UnknownStream,
)
from vlora.operations import Operation

DARK, BRIGHT = png(10), png(250)
NIGHT: dict[str, Any] = {"adapter": "cam", "head": "night"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    adapters = {"cam": {"night": 1, "motion": 2, "never": 1, "dusk": 1, "overloaded": 1}, "dim": {}}
    with running_server(adapters, max_image_pixels=10_000, max_streams=8, stream_keep_s=0.4) as running:
        yield running


@pytest.fixture(autouse=True)
def frees_everything(server: Running) -> Iterator[None]:
    yield
    until(lambda: len(server.front_end.streams) == 0 and not server.engine.engine.running)


def cut(client: Client | AsyncClient) -> None:
    with contextlib.suppress(EOFError, OSError):  # the connection may already be closed
        client.connection().close()


async def answer_of(client: Client, call: Operation) -> Any:
    return client.connection().start(call).result(PATIENCE_S)


def labels(stream: FrameStream) -> list[tuple[int, str]]:
    return [(each.number, each.answer.label) for each in stream if each.answer is not None]


def test_every_frame_gets_its_answer_in_order(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(BRIGHT)
    with client.open_stream(**NIGHT, drop="none") as stream:
        frames = [DARK, bytearray(BRIGHT), tmp_path / "a.png", (bytes(4 * 6 * 3), 4, 6)]
        assert [stream.send(frame) for frame in (*frames, numpy.full((4, 6, 3), 255, numpy.uint8))] == [0, 1, 2, 3, 4]
        stream.end()
        assert labels(stream) == [(0, "dark"), (1, "bright"), (2, "bright"), (3, "dark"), (4, "bright")]
    with client.open_stream(adapter="cam", head="motion") as stream:
        stream.send(BRIGHT, DARK)
        assert next(stream).answer is not None


ASKED = [("cam", "night", None), ("cam", "dusk", None), ("cam+dim", None, "say:hello"), (None, None, "say:world")]
QUESTIONS = [TextQuestion("say:hello", "cam+dim", max_tokens=3), TextQuestion("say:world")]


def test_several_heads_and_questions_answer_each_frame_and_a_broken_one_fails_alone(client: Client) -> None:
    with client.open_stream(**NIGHT, heads=[("cam", "dusk")], questions=QUESTIONS, drop="none") as stream:
        for frame in (DARK, b"no image", BRIGHT):
            stream.send(frame)
        with pytest.raises(BadRequest, match="reads 1 image per frame; got 2"):
            stream.send(DARK, DARK)
        dark, broken, bright = (next(stream) for _ in range(3))
    asked = [(each.adapter, each.head, each.question) for each in dark.answers]
    assert asked == ASKED and dark.answer is not None and dark.answer.head == "night"
    for result, expected in ((dark, "dark"), (bright, "bright")):
        assert [each.label for each in result.answers] == [expected, expected, "hel", "world"]
        assert result.answers[2].text is not None and result.answers[2].text.finish_reason == "length"
    assert broken.error is not None and isinstance(broken.error.to_exception(), BadImage)
    assert [each.error and each.error.code for each in broken.answers] == ["bad_image"] * 4


def test_words_alone_take_frames_of_any_number_of_images(client: Client) -> None:
    with client.open_stream(questions=[TextQuestion("say:x")], drop="none") as stream:
        stream.send(DARK)
        stream.send(DARK, BRIGHT, DARK)
        with pytest.raises(BadRequest, match="the frame has no image"):
            stream.send()
        results = [next(stream), next(stream)]
    assert [each.answers[0].label for each in results] == ["x", "x"] and results[0].answer is None
    assert [each.answers[0].text and each.answers[0].text.num_prompt_tokens for each in results] == [6, 8]


Q, CAM = TextQuestion, ("cam", "night")
BOTH = r"read different numbers of images per frame \(head 'night' of adapter 'cam' 1, head 'motion' .* 2\)"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, BadRequest, "no head and no question"),
    ({**NIGHT, "max_latency_s": 0}, BadRequest, "max_latency_s is 0"),
    ({**NIGHT, "fps": float("nan")}, BadRequest, "fps is nan"),
    ({**NIGHT, "drop": "oldest"}, BadRequest, "choose newest or none"),
    ({**NIGHT, "name": "x" * 101}, BadRequest, "name has 101 characters; the maximum is 100"),
    ({"adapter": "cam"}, BadRequest, "adapter is 'cam' and head is None; give both, or neither"),
    ({"adapter": "cam+dim", "head": "night"}, UnknownAdapter, r"'cam\+dim' is a composition; a task head belongs"),
    ({"heads": [("cam",)]}, BadRequest, "heads must be pairs"),
    ({"heads": [CAM, CAM]}, BadRequest, "head 'night' of adapter 'cam' is given twice"),
    ({"heads": [CAM, ("zoo", "night")]}, UnknownAdapter, "no adapter named 'zoo'"),
    ({"heads": [CAM, ("cam", "x")]}, UnknownHead, "adapter 'cam' has no head 'x'"),
    ({"heads": [CAM, ("cam", "motion")]}, BadRequest, BOTH),
    ({"heads": [*(("cam", str(each)) for each in range(2000))]}, BadRequest, "2000 heads and questions"),
    *(({"questions": [Q("q", name)]}, UnknownAdapter, "no adapter named 'zoo'") for name in ("zoo", "cam+zoo")),
    ({"questions": [Q("q"), Q("q", None, 3)]}, BadRequest, "'q' to the base model is given"),
    ({"questions": [*[Q("q", "cam")] * 2]}, BadRequest, "'q' to adapter 'cam' is given twice"),
    ({"questions": [Q("q", None, "8")]}, BadRequest, "must be a whole number"),  # type: ignore[arg-type]
    ({"questions": ["what ?"]}, BadRequest, "must be values of vlora.client.TextQuestion"),
    ({"questions": [Q("")]}, BadRequest, "a question of the stream is empty"),
    ({"questions": [Q("q", max_tokens=0)]}, BadRequest, "max_tokens is 0"),
    ({"questions": [Q("q" * (10**6 + 1))]}, TooLarge, "characters"),
]


def test_a_stream_that_cannot_be_opened_leaves_another(client: Client) -> None:
    with client.open_stream(**NIGHT) as other:
        for number, (options, error, why) in enumerate(REFUSED):
            with pytest.raises(error, match=why) as refused:
                client.open_stream(**options)
            assert "\n" not in str(refused.value)
            other.send(DARK)
            assert next(other).number == number


def test_an_adapter_unloaded_under_a_stream_fails_alone(server: Running, client: Client, tmp_path: Path) -> None:
    client.load_adapter("brief", write_adapter(tmp_path, {"kind": 1}))
    with client.open_stream(heads=[("brief", "kind"), ("cam", "night")], drop="none") as stream:
        stream.send(DARK)
        assert [each.label for each in next(stream).answers] == ["dark", "dark"]
        client.unload_adapter("brief")
        stream.send(BRIGHT)
        result = next(stream)
    assert [each.error and each.error.code for each in result.answers] == ["unknown_adapter", None]
    assert result.answers[1].label == "bright" and result.error is None


def test_the_camera_example_of_the_readme(
    server: Running, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on_loop(server.front_end.adapters.load("traffic", write_adapter(tmp_path, {"jam": 1})))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "open_stream" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    names["watch"](client, [BRIGHT, b"no image"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("0 bright 0.9") and second.startswith("1 image 1 (8 bytes)")


def test_frames_of_other_types_are_not_sent(client: Client) -> None:
    other: list[Any] = [7, (b"abc", 1), array.array("f", [1.0]), numpy.zeros((2, 2, 3), "datetime64[s]")]
    with client.open_stream(**NIGHT, drop="none") as stream:
        for frame in (*other, "no\0path", (b"abc", 0, 1), (b"abc", 1, 2), (b"abc", 10**9, 10**9)):
            with pytest.raises((BadImage, TooLarge)):
                stream.send(frame)
        assert stream.send(BRIGHT) == 0


def test_service_levels_of_a_stream_reach_the_engine(client: Client) -> None:
    with client.open_stream(adapter="cam", head="overloaded", priority=4) as stream:
        stream.send(DARK)
        error = next(stream).error
    assert error is not None and (error.code, error.message) == ("deadline_unreachable", "latency None ttft None +4")


def test_a_broken_connection_loses_and_repeats_no_result(client: Client) -> None:
    expected = [(number, "bright" if number % 3 == 0 else "dark") for number in range(60)]
    with client.open_stream(**NIGHT, drop="none") as stream:

        def send() -> None:
            for number in range(60):
                if number % 10 == 5:
                    cut(client)
                assert stream.send(BRIGHT if number % 3 == 0 else DARK) == number
            stream.end()

        sender = threading.Thread(target=send)
        sender.start()
        got = []
        for result in stream:
            assert result.answer is not None
            got.append((result.number, result.answer.label))
            if result.number % 20 == 7:
                cut(client)
        sender.join()
    assert got == expected


def test_reconnection_is_tried_until_the_stream_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerConfig().stream_keep_s == 30
    now = 0.0
    monkeypatch.setattr(frame_stream.time, "monotonic", lambda: now)
    retry, error = ReconnectBackoff(), Disconnected("gone")
    now = 20.0  # the call was held before its connection broke
    pauses = []
    while now < 49:
        pauses.append(retry.pause_s(error))
        now += pauses[-1]
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0] and max(pauses) == 2.0
    now = 50.0
    with pytest.raises(Disconnected):
        retry.pause_s(error)


def test_asyncio_reconnects_after_a_broken_connection(server: Running) -> None:
    async def main() -> list[int]:
        async with AsyncClient(port=server.port) as client:
            stream = await client.open_stream(**NIGHT, drop="none")
            async with stream:

                async def send() -> None:
                    for number in range(20):
                        if number == 10:
                            cut(client)
                        await stream.send(DARK)
                    await stream.end()

                sender = asyncio.create_task(send())
                # Reading may be cancelled and continued.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(stream), 1e-6)
                got = [result.number async for result in stream]
                await sender
                return got

    assert asyncio.run(main()) == list(range(20))


def test_a_stream_expires_without_its_client(server: Running, client: Client) -> None:
    stream = client.open_stream(adapter="cam", head="never")
    stream.send(DARK)
    until(lambda: server.engine.engine.running)
    client.close()
    assert len(server.front_end.streams) == 1
    until(lambda: len(server.front_end.streams) == 0 and not server.engine.engine.running)
    with pytest.raises(UnknownStream, match="open a new one"):
        stream.send(DARK)


def test_streams_of_one_connection_do_not_block_one_another(server: Running) -> None:
    with (
        Client(port=server.port, timeout_s=0.3) as client,
        client.open_stream(adapter="cam", head="never", drop="none") as stuck,
        client.open_stream(**NIGHT, drop="none") as unread,
        client.open_stream(**NIGHT, drop="none") as good,
    ):
        for _ in range(8):
            stuck.send(DARK)
        with pytest.raises(DeadlineMissed, match="frame 8 found no room within"):
            stuck.send(DARK)
        for _ in range(20):
            unread.send(DARK)
        for number in range(10):
            good.send(BRIGHT)
            assert next(good).number == number


def test_waiting_for_results_sends_few_calls_and_closing_ends_a_reader(client: Client) -> None:
    num_calls = 0

    async def counted(call: Operation) -> Any:
        nonlocal num_calls
        num_calls += 1
        return await answer_of(client, call)

    with client.open_stream(**NIGHT) as stream:
        reading = FrameStream(AsyncFrameStream(stream.stream_id, counted, Blocking(), 10.0))
        reader = threading.Thread(target=lambda: next(reading))
        reader.start()
        time.sleep(0.3)
        assert num_calls == 1
        reading.send(DARK)
        reader.join(PATIENCE_S)
        assert num_calls == 2 and not reader.is_alive()
        read: list[Any] = []
        reader = threading.Thread(target=lambda: read.extend(stream))
        reader.start()
        time.sleep(0.05)
    reader.join(PATIENCE_S)
    assert not reader.is_alive() and len(read) <= 1


def test_a_stream_belongs_to_its_token(tmp_path: Path) -> None:
    tokens = tuple(Token(name=name, secret=name * 16) for name in "ab")
    with running_server(tokens=tokens) as server:
        server.on_loop(server.front_end.adapters.load("cam", write_adapter(tmp_path, {"night": 1})))
        with (
            Client(port=server.port, token="a" * 16) as mine,
            Client(port=server.port, token="b" * 16) as other,
            mine.open_stream(**NIGHT) as stream,
        ):
            stream.send(DARK)
            ask = functools.partial(answer_of, other)
            thief = FrameStream(AsyncFrameStream(stream.stream_id, ask, Blocking(), 1))
            for steal in (lambda: next(thief), lambda: thief.send(DARK), thief.end):
                with pytest.raises(UnknownStream):
                    steal()
            thief.close()
            assert next(stream).answer is not None
