"""A frame stream on the server: order, dropped frames, waiting frames, and repeated calls."""

from __future__ import annotations

import asyncio
import datetime
import gc
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tests.virtual_clock import VirtualClockLoop
from vlora.client.values import Answer, FrameResult, HeadResult, StreamOptions, TextQuestion
from vlora.config import ServerConfig, Token
from vlora.errors import BadRequest, OverCapacity, StepFailed, UnknownHead, UnknownStream
from vlora.server.detokenizer import Piece
from vlora.server.metrics import Metrics
from vlora.server.prompts import SharedImages, TextRequest
from vlora.server.security.limits import ByteBudget, ByteCharge
from vlora.server.streams.frame_stream import MAX_UNACKNOWLEDGED, StreamSession
from vlora.server.streams.registry import StreamRegistry
from vlora.types import Timings

TIMINGS = Timings(
    queue_s=0, ttft_s=0, latency_s=0, num_prompt_tokens=1, num_completion_tokens=0, num_preemptions=0, steps_by_mode={}
)


def answer(label: str) -> HeadResult:
    named: dict[str, Any] = {"task": "classification", "label": label, "labels": (label,), "label_id": 0}
    return HeadResult(**named, confidence=1.0, scores=(1.0,), adapter="cam", head="night", timings=TIMINGS, total_s=0)


def no_bytes() -> ByteCharge:
    return ByteCharge(ByteBudget(1))


LOOP = VirtualClockLoop


class Head:
    """Answers a frame with its bytes, and a question with itself: immediately, or after `allow`."""

    def __init__(self, at_once: bool = True, engine_starting: bool = False) -> None:
        self.at_once, self.engine_starting = at_once, engine_starting
        self.requested: list[bytes] = []
        self.bounds: list[float | None] = []
        self.num_read = self.cancelled = 0
        self._gates: dict[bytes, asyncio.Event] = {}

    async def ask_head(
        self, images: Any, adapter: str, head: str, *, max_latency_s: float | None = None, **_: Any
    ) -> HeadResult:
        if head == "unknown":
            raise UnknownHead("no such head")
        (image,) = await images.processed(self._read)
        self.requested.append(image)
        self.bounds.append(max_latency_s)
        gate = self._gates[image] = asyncio.Event()
        try:
            if not self.at_once:
                await gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if image == b"fail":
            raise StepFailed("the step failed")
        if image == b"trip":
            raise ValueError("tripped")
        if image == b"late":
            raise TimeoutError("a socket")
        return answer(image.decode())

    async def generate(self, asked: TextRequest) -> AsyncGenerator[tuple[int, Piece | Answer], None]:
        assert asked.whole and isinstance(asked.images, SharedImages) and isinstance(asked.prompt, str)
        await asked.images.processed(self._read)
        if asked.prompt == "slow":
            await asyncio.sleep(3600)
        text = asked.prompt[: asked.sampling.max_tokens]
        counts: dict[str, Any] = {"num_prompt_tokens": 1, "num_completion_tokens": 1}
        yield 0, Answer(text=text, finish_reason="length", adapter=asked.adapter, **counts, timings=TIMINGS, total_s=0)

    async def _read(self, images: Any) -> Any:
        self.num_read += 1
        return images

    async def allow(self, *images: bytes) -> None:
        for image in images:
            self._gates[image].set()
        await settle()


def make(head: Head, metrics: Metrics | None = None, **options: Any) -> StreamSession:
    stream_options = StreamOptions(**{"heads": (("cam", "night"),)} | options)
    return StreamSession(head, stream_options, 1 if stream_options.heads else None, metrics or Metrics())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def send(stream: StreamSession, *frames: bytes, first: int = 0) -> None:
    for number, frame in enumerate(frames, first):
        assert await stream.send(number, (frame,), 0, no_bytes())
        await settle()


def labels(results: Sequence[FrameResult]) -> list[tuple[int, str]]:
    return [(each.number, each.answer.label if each.answer else "dropped" if each.dropped else "") for each in results]


async def test_results_come_in_frame_order_and_stay_until_they_are_acknowledged() -> None:
    head = Head(at_once=False)
    stream = make(head, drop="none")
    await send(stream, b"a", b"b", b"c")
    await head.allow(b"c", b"b")
    assert (await stream.pull(-1, 0.01)).results == ()
    await head.allow(b"a")
    first = (await stream.pull(-1, 1)).results
    assert labels(first) == [(0, "a"), (1, "b"), (2, "c")] and (await stream.pull(-1, 1)).results == first
    assert labels((await stream.pull(0, 1)).results) == [(1, "b"), (2, "c")]
    for number, why in ((-1, "acknowledged and are no longer available"), (3, "no result"), (10**30, "no result")):
        with pytest.raises(BadRequest, match=why):
            await stream.pull(number, 0)


async def test_acknowledged_results_are_forgotten() -> None:
    """A camera may send for days."""
    stream = make(Head(), drop="none")
    for number in range(100):
        await send(stream, b"x", first=number)
        assert len((await stream.pull(number - 1, 1)).results) == 1
    await stream.pull(99, 0)
    gc.collect()
    mine = [each for each in gc.get_objects() if isinstance(each, FrameResult) and each.number < 99]
    assert mine == [], "the console shows the last one"


async def test_a_newer_frame_replaces_a_waiting_one() -> None:
    head = Head(at_once=False)
    stream = make(head)
    await send(stream, *(b"%d" % number for number in range(7)))
    assert head.requested == [b"0", b"1", b"2", b"3"]
    await head.allow(*head.requested)
    await head.allow(b"6")
    results = (await stream.pull(-1, 1)).results
    assert labels(results) == [(0, "0"), (1, "1"), (2, "2"), (3, "3"), (4, "dropped"), (5, "dropped"), (6, "6")]
    assert results[4].dropped == "frame 5 arrived before this one was started"


async def test_without_dropping_a_send_waits_for_room_and_a_later_call_replaces_it() -> None:
    head = Head(at_once=False)
    stream = make(head, drop="none")
    old = asyncio.create_task(stream.pull(-1, 5))
    await settle()
    new = asyncio.create_task(stream.pull(-1, 5))
    assert (await old).results == () and not new.done()
    await send(stream, *(b"%d" % number for number in range(8)))
    assert not await stream.send(8, (b"8",), 0.01, no_bytes())
    first = asyncio.create_task(stream.send(8, (b"old",), 5, no_bytes()))
    await settle()
    second = asyncio.create_task(stream.send(8, (b"new",), 5, no_bytes()))
    assert not await first and not second.done()
    await head.allow(b"0")
    assert await second and labels((await new).results) == [(0, "0")]


@pytest.mark.parametrize("drop", ["newest", "none"])
async def test_unread_results_are_bounded(drop: str) -> None:
    stream = make(Head(), drop=drop)
    await send(stream, *[b"x"] * MAX_UNACKNOWLEDGED)
    assert not await stream.send(MAX_UNACKNOWLEDGED, (b"x",), 0.01, no_bytes())
    results = (await stream.pull(-1, 1)).results
    assert len(results) == 64
    await stream.pull(results[-1].number, 0)
    assert await stream.send(MAX_UNACKNOWLEDGED, (b"x",), 0, no_bytes())
    stream.cancel()
    await settle()


async def test_a_frame_sent_again_is_accepted_once() -> None:
    head = Head()
    stream = make(head)
    await send(stream, b"a")
    assert await stream.send(0, (b"a",), 0, no_bytes())
    await settle()
    assert head.requested == [b"a"]
    for number, images, why in (
        *((number, (b"c",), "expected frame 1") for number in (2, -1)),
        (1, (b"c", b"d"), "reads 1 image per frame; got 2"),
    ):
        with pytest.raises(BadRequest, match=why):
            await stream.send(number, images, 0, no_bytes())


async def test_a_failure_belongs_to_its_frame() -> None:
    stream = make(Head(), drop="none")
    await send(stream, b"fail", b"trip", b"late", b"a")
    *failed, good = (await stream.pull(-1, 1)).results
    messages = ("the step failed", "ValueError: tripped", "TimeoutError: a socket")
    for result, message in zip(failed, messages, strict=True):
        assert result.error is not None and message in result.error.message
    assert failed[0].error is not None and isinstance(failed[0].error.to_exception(), StepFailed)
    assert good.answer is not None


async def test_each_frame_has_the_streams_latency_bound() -> None:
    head = Head(at_once=False)
    stream = make(head, drop="none", max_latency_s=0.05)
    await send(stream, *(b"%d" % number for number in range(5)))
    results: list[FrameResult] = []
    while len(results) < 5:
        results += (await stream.pull(len(results) - 1, 1)).results
    assert [each.error.code if each.error else None for each in results] == ["deadline_missed"] * 5
    assert head.cancelled == 4 == len(head.requested), "the fifth passed its bound before it started"
    assert all(bound is not None and 0 < bound <= 0.05 for bound in head.bounds)


async def test_one_of_a_frames_heads_and_questions_may_fail() -> None:
    head = Head()
    heads = (("cam", "unknown"), ("cam", "night"))
    stream = make(head, heads=heads, questions=(TextQuestion("slow"),), max_latency_s=1.0, drop="none")
    await send(stream, b"a", b"fail")
    first, second = (await stream.pull(-1, 2)).results
    assert [each.error and each.error.code for each in first.answers] == ["unknown_head", None, "deadline_missed"]
    assert first.answers[1].label == "a" and first.error is None and first.answer is None
    assert second.error is not None and second.error.code == "unknown_head", "of the first, as nothing was answered"
    assert (stream.num_answered, stream.num_failed) == (1, 1)
    assert head.num_read == 2, "the images of each frame are processed once"


async def test_no_more_frames_are_started_than_the_frame_rate() -> None:
    head = Head()
    stream = make(head, drop="none", fps=20)
    loop = asyncio.get_running_loop()
    started = loop.time()
    await send(stream, b"0", b"1", b"2", b"3")
    assert len(head.requested) < 4
    stream.end()
    numbers = [-1]
    while numbers[-1] < 3:
        numbers += [each.number for each in (await stream.pull(numbers[-1], 1)).results]
    assert numbers == [-1, 0, 1, 2, 3] and loop.time() - started > 0.09
    assert (await stream.pull(3, 0)).finished


async def test_end_answers_accepted_frames_and_cancel_frees_them() -> None:
    head = Head(at_once=False)
    stream = make(head)
    await send(stream, b"a", b"b")
    stream.end()
    with pytest.raises(BadRequest, match="has ended"):
        await stream.send(2, (b"c",), 0, no_bytes())
    await head.allow(b"a")
    part = await stream.pull(-1, 1)
    assert labels(part.results) == [(0, "a")] and not part.finished
    waiting = asyncio.create_task(stream.pull(0, 5))
    await settle()
    stream.cancel()
    with pytest.raises(UnknownStream):
        await waiting
    await settle()
    assert head.cancelled == 1


async def test_streams_belong_to_their_token_and_expire_without_a_connection() -> None:
    head = Head(at_once=False)
    metrics = Metrics()
    streams = StreamRegistry(head, ServerConfig(max_streams=2, stream_keep_s=0.05), metrics)
    options = StreamOptions(heads=(("cam", "night"),))
    mine, other = (Token(name=name, secret=name * 16) for name in "ab")
    first = streams.open(options, 1, mine, "connection 1")
    assert streams.open(options, 1, mine, "connection 2") != first
    with pytest.raises(OverCapacity, match="2 streams are open"):
        streams.open(options, 1, mine, "connection 3")
    for owner in (other, None):
        with pytest.raises(UnknownStream):
            streams.use(first, owner, "connection 3")
    await send(streams.use(first, mine, "connection 1"), b"a")
    streams.leave("connection 1")
    renewed = Token(name="a", secret="another" * 4, expires=datetime.datetime(2099, 1, 1, tzinfo=datetime.UTC))
    streams.use(first, renewed, "connection 4")
    await asyncio.sleep(0.1)
    assert len(streams) == 2 and head.cancelled == 0
    streams.leave("connection 4")
    await asyncio.sleep(0.1)
    assert len(streams) == 1 and head.cancelled == 1
    with pytest.raises(UnknownStream, match="is open"):
        streams.use(first, mine, "connection 4")
    assert b"vlora_streams_open 1.0" in metrics.render(None)
    streams.close()
    assert len(streams) == 0 and b"vlora_streams_open 0.0" in metrics.render(None)


async def test_metrics_count_every_frame_at_its_start_and_end() -> None:
    metrics = Metrics()
    head = Head(at_once=False)
    stream = make(head, metrics)
    await send(stream, *(b"%d" % number for number in range(8)))  # four run, three were dropped, one waits
    assert await stream.send(7, (b"again",), 0, no_bytes())
    stream.cancel()
    await settle()
    late = make(Head(at_once=False), metrics, max_latency_s=0.01)
    await send(late, b"0")
    await late.pull(-1, 1)
    quick = make(Head(at_once=True), metrics)
    await send(quick, b"0", b"1")
    await quick.pull(-1, 1)
    quick.cancel()
    counted = re.findall(rb"^vlora_frames_total\{outcome=\"(\w+)\"\} (\S+)$", metrics.render(None), re.MULTILINE)
    outcomes = {"dropped": 3, "closed": 5, "deadline_missed": 1, "answered": 2}
    assert {name.decode(): float(value) for name, value in counted if float(value)} == outcomes
    assert b"vlora_frames_taken_total 11.0" in metrics.render(None)
    assert b"vlora_frame_seconds_count 2.0" in metrics.render(None)


@pytest.mark.parametrize("drop", ["newest", "none"])
async def test_every_frame_releases_its_bytes_once(drop: str) -> None:
    head = Head(at_once=False)
    stream = make(head, drop=drop)
    budget = ByteBudget(1000)

    def charge(num_bytes: int) -> ByteCharge:
        assert budget.reserve(num_bytes)
        return ByteCharge(budget, num_bytes)

    for number in range(8):
        assert await stream.send(number, (b"%d" % number,), 0, charge(1 << number))
        await settle()
    dropped = 0b01110000 if drop == "newest" else 0  # four run, one waits
    assert budget.used == 0b11111111 - dropped
    assert await stream.send(3, (b"3",), 0, charge(256))  # sent again: known
    with pytest.raises(BadRequest):
        await stream.send(99, (b"x",), 0, charge(256))
    if drop == "none":
        assert not await stream.send(8, (b"8",), 0, charge(256))
    assert budget.used == 0b11111111 - dropped
    await head.allow(b"1")
    assert budget.used & 0b10 == 0
    stream.cancel()
    await settle()
    assert budget.used == 0


@pytest.mark.parametrize(("drop", "kept"), [("newest", [b"d"]), ("none", [b"a", b"b", b"c", b"d"])])
async def test_frames_and_then_the_sender_wait_while_an_engine_starts(drop: str, kept: list[bytes]) -> None:
    head = Head(engine_starting=True)
    stream = make(head, drop=drop)
    await send(stream, b"a", b"b", b"c", b"d")
    await settle()
    assert head.requested == [] and stream.num_waiting == len(kept)
    assert drop == "newest" or not await stream.send(4, (b"e",), 0.01, no_bytes())
    head.engine_starting = False
    stream.resume()
    await settle()
    results = (await stream.pull(-1, 5)).results
    assert head.requested == kept and len(results) == 4
    assert labels(results) == [(n, each if each.encode() in kept else "dropped") for n, each in enumerate("abcd")]


async def test_a_waiting_frame_fails_at_its_bound_while_an_engine_starts() -> None:
    head, budget, metrics = Head(engine_starting=True), ByteBudget(2), Metrics()
    stream = make(head, metrics, drop="none", max_latency_s=0.05)
    for number in range(2):
        assert budget.reserve(1)
        assert await stream.send(number, (b"%d" % number,), 0, ByteCharge(budget, 1))
        await asyncio.sleep(0.02)
    for number in range(2):
        (result,) = (await stream.pull(number - 1, 5)).results
        assert result.error is not None and result.error.code == "deadline_missed"
        assert "restarting" in result.error.message and result.latency_s >= 0.05
        assert budget.used == 1 - number
    assert head.requested == []
    await send(stream, b"more", first=2)
    stream.cancel()
    await asyncio.sleep(0.1)
    assert stream.num_failed == 2, "a cancelled stream has no timer left"
