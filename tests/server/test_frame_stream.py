"""A frame stream on the server: order, dropped frames, waiting frames, and repeated calls."""

from __future__ import annotations

import asyncio
import datetime
import gc
import random
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tests.example_counts import scaled
from tests.virtual_clock import VirtualClockLoop
from vlora.client.values import Answer, FrameResult, HeadResult, StreamOptions, TextQuestion
from vlora.config import ServerConfig, Token
from vlora.errors import BadImage, BadRequest, OverCapacity, StepFailed, UnknownHead, UnknownStream
from vlora.server.detokenizer import Piece
from vlora.server.metrics import Metrics
from vlora.server.prompts import Level, SharedImages, TextRequest
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

    async def ask_head(self, images: Any, adapter: str, head: str, level: Level) -> HeadResult:
        if head == "unknown":
            raise UnknownHead("no such head")
        (image,) = await images.processed(self._read)
        self.requested.append(image)
        self.bounds.append(level.max_latency_s)
        gate = self._gates[image] = asyncio.Event()
        try:
            if not self.at_once:
                await gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if image.startswith(b"fail"):
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


def make(head: Any, metrics: Metrics | None = None, **options: Any) -> StreamSession:
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


FAILS = 5  # the answer to each fifth frame fails


def picture_of(number: int) -> bytes:
    return b"fail %d" % number if number % FAILS == 3 else b"%d" % number


class Life:
    """A stream, and what a caller may expect of it: a plain list of its frames, each with its state."""

    def __init__(self, drop: str) -> None:
        self.head, self.metrics, self.budget = Head(at_once=False), Metrics(), ByteBudget(10**9)
        self.stream = make(self.head, self.metrics, drop=drop)
        self.drops = drop == "newest"
        self.states: list[str] = []  # waiting, running, dropped, the label of an answer, or empty for a failure
        self.acknowledged = -1
        self.ended = False

    def of(self, *states: str) -> list[int]:
        return [number for number, state in enumerate(self.states) if state in states]

    def open(self) -> list[int]:
        """Frames without a result."""
        return self.of("waiting", "running")

    def start(self) -> None:
        while (waiting := self.of("waiting")) and len(self.of("running")) < 4 and not self.head.engine_starting:
            self.states[waiting[0]] = "running"

    async def send(self, number: int, num_images: int = 1) -> None:
        assert self.budget.reserve(1 + number)
        charge = ByteCharge(self.budget, 1 + number)
        sent = self.stream.send(number, (picture_of(number),) * num_images, 0.01, charge)
        if 0 <= number < len(self.states):
            assert await sent, "sent again: it is known"
        elif self.ended or number != len(self.states) or num_images != 1:
            with pytest.raises(BadRequest, match=r"has ended|expected frame \d|reads 1 image per frame; got 2"):
                await sent
        else:
            waiting = self.of("waiting")
            room = number - 1 - self.acknowledged < MAX_UNACKNOWLEDGED and (self.drops or len(waiting) < 4)
            assert await sent == room
            if room:
                self.states += ["waiting"]
                if self.drops and waiting:
                    self.states[waiting[0]] = "dropped"

    async def pull(self, acknowledged: int) -> None:
        pulled, known = self.stream.pull(acknowledged, 0.01), range(self.acknowledged, len(self.states))
        if acknowledged not in known or any(number <= acknowledged for number in self.open()):
            with pytest.raises(BadRequest, match=r"are no longer available|it has no result yet"):
                await pulled
            return
        self.acknowledged = acknowledged
        found = await pulled
        ready = range(acknowledged + 1, [*self.open(), len(self.states)][0])
        assert labels(found.results) == [(number, self.states[number]) for number in ready][:64]
        assert found.finished == (self.ended and acknowledged + 1 + len(found.results) == len(self.states))

    async def finish(self, number: int) -> None:
        self.states[number] = "" if number % FAILS == 3 else str(number)
        await self.head.allow(picture_of(number))

    async def live(self, draw: random.Random) -> None:
        actions = ["send"] * 5 + ["again", "early", "two", "pull", "pull", "finish", "finish", "engine", "end"]
        for _ in range(80):
            match draw.choice(actions):
                case "send":
                    await self.send(len(self.states))
                case "again" if self.states:
                    await self.send(draw.randrange(len(self.states)))
                case "early":
                    await self.send(draw.choice([-1, len(self.states) + 1]))
                case "two":
                    await self.send(len(self.states), num_images=2)
                case "pull":
                    await self.pull(draw.choice([self.acknowledged, self.acknowledged + draw.randint(-1, 4), 10**30]))
                case "finish" if running := self.of("running"):
                    await self.finish(draw.choice(running))
                case "engine":
                    self.head.engine_starting = not self.head.engine_starting
                    self.stream.resume()
                case "end" if draw.random() < 0.1:
                    self.ended = True
                    self.stream.end()
            self.start()
            await settle()
            assert self.budget.used == sum(1 + number for number in self.open())
            assert self.stream.num_waiting == len(self.of("waiting"))
            assert self.stream.num_running == len(self.of("running"))


@pytest.mark.parametrize("drop", ["newest", "none"])
async def test_random_lives_of_a_stream(drop: str) -> None:
    """Results in frame order until they are acknowledged, frames that give way or wait, bytes and counts of each."""
    for seed in range(scaled(100)):
        life = Life(drop)
        await life.live(random.Random(seed))
        waiting = asyncio.create_task(life.stream.pull(life.acknowledged, 5))
        await asyncio.sleep(0)
        life.stream.cancel()
        await settle()
        assert life.budget.used == 0 and life.head.cancelled == len(life.of("running"))
        assert waiting.done() and (waiting.exception() is None or isinstance(waiting.exception(), UnknownStream))
        expected = {"dropped": len(life.of("dropped")), "closed": len(life.open()), "step_failed": len(life.of(""))}
        expected["answered"] = len(life.states) - sum(expected.values())
        text = life.metrics.render(None).decode()
        counted = dict(re.findall(r"^vlora_frames_total\{outcome=\"(\w+)\"\} (\S+)$", text, re.MULTILINE))
        assert {name: float(counted.get(name, 0)) for name in expected} == expected
        assert f"vlora_frames_taken_total {float(len(life.states))}" in text
        assert f"vlora_frame_seconds_count {float(expected['answered'])}" in text


async def test_errors_of_any_kind_belong_to_their_frame() -> None:
    stream = make(Head(), drop="none")
    await send(stream, b"fail", b"trip", b"late", b"a")
    *failed, good = (await stream.pull(-1, 1)).results
    messages = ("the step failed", "ValueError: tripped", "TimeoutError: a socket")
    for result, message in zip(failed, messages, strict=True):
        assert result.error is not None and message in result.error.message
    assert failed[0].error is not None and isinstance(failed[0].error.to_exception(), StepFailed)
    assert good.answer is not None


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


async def test_a_frame_that_cannot_be_drawn_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    class Preview:
        async def update(self, images: Any, result: FrameResult) -> None:
            raise BadImage("truncated")

    stream = StreamSession(Head(), StreamOptions(heads=(("cam", "night"),)), 1, Metrics(), Preview())  # type: ignore[arg-type]
    await send(stream, b"day")
    assert labels((await stream.pull(-1, 1)).results) == [(0, "day")]
    assert [record.message for record in caplog.records] == ["frame 0 of a stream cannot be drawn for the console"]


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


async def test_streams_belong_to_their_token_and_expire_without_a_connection() -> None:
    head: Any = Head(at_once=False)
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
