"""An engine's process: whole messages over its socket, work while it is idle, and what it sends of answers and load."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.scripted import ENGINE_COMMAND, write_adapter
from vlora.config import EngineConfig
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.messages import EngineTransport, LoadReport, LoadReporter, WatchedLoad, decode_from_engine, encode
from vlora.engine.ipc.worker import PACE_S, SEARCH_PACE_S, EngineWorker, OutputCoalescer
from vlora.engine.snapshot import EngineLoad
from vlora.errors import StepFailed
from vlora.types import ErrorValue, Request, RequestOutput, SamplingParams, TokenScore
from vlora.wire.framing import MessageTransport

# -- the socket --------------------------------------------------------------------------------------------------------

_LARGE = 3_000_001  # more than the kernel buffers for one end


def run_ends(main: Callable[[MessageTransport, EngineTransport, asyncio.Queue[bytes]], Awaitable[None]]) -> None:
    """Run with both ends of a connection, and a queue of what the front end receives."""

    async def with_ends() -> None:
        here, there = socket.socketpair()
        inbox: asyncio.Queue[bytes] = asyncio.Queue()
        client = await MessageTransport.open(here, inbox.put_nowait)
        with there:
            await asyncio.wait_for(main(client, EngineTransport(there), inbox), 30)
            client.close()
            client.close()

    asyncio.run(with_ends())


def test_messages_cross_in_order_both_ways_at_once() -> None:
    """Large messages both ways, too: an end that is blocked in sending must still receive."""
    count = 200

    def message(number: int) -> bytes:
        return b"%d " % number + b"." * (_LARGE if number % 50 == 7 else 0)

    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        received: list[bytes] = []

        def other() -> None:
            """Answers each message and sends another one after it: twice as much data returns."""
            for number in range(count):
                received.append(bytes(engine.receive(block=True) or b""))
                engine.send(message(2 * number))
                engine.send(message(2 * number + 1))

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        for number in range(count):
            client.send(message(number))
        assert [await inbox.get() for _ in range(2 * count)] == [message(number) for number in range(2 * count)]
        thread.join()
        assert received == [message(number) for number in range(count)]
        assert engine.receive(block=False) is None
        threading.Timer(0.05, engine.wake).start()
        assert engine.receive(block=True) is None

    run_ends(main)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_messages_are_independent_of_how_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    async def main() -> None:
        inbox: list[bytes] = []
        client = MessageTransport(inbox.append)
        stream = b"".join(struct.pack("<Q", len(message)) + message for message in messages)
        length = len(stream)
        for number in range(len(stream)):
            size = cuts[number % len(cuts)]
            client.data_received(stream[:size])
            stream = stream[size:]
            assert client.num_bytes_received == length - len(stream)
        assert inbox == messages

    asyncio.run(main())


def test_a_read_interrupted_by_a_signal_continues() -> None:
    """As when the process is suspended while it receives an image."""
    stream = bytearray(b"".join(struct.pack("<Q", len(word)) + word for word in (b"first word", b"second")))

    readable, other = socket.socketpair()
    other.send(b".")

    class Interrupted:
        def recv_into(self, buffer: memoryview, size: int, flags: int) -> int:
            count = min(3, len(buffer), len(stream))
            buffer[:count] = stream[:count]
            del stream[:count]
            return count

        def fileno(self) -> int:
            return readable.fileno()

    with readable, other:
        engine = EngineTransport(Interrupted())  # type: ignore[arg-type]
        assert engine.receive(block=True) == b"first word" and engine.receive(block=True) == b"second"
        with pytest.raises(EOFError):
            engine.receive(block=True)


def test_an_error_of_the_message_callback_closes_the_transport() -> None:
    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        client.on_message = int
        for word in (b"1", b"two", b"three"):
            engine.send(word)
        with pytest.raises(ValueError, match="two"):
            await client.closed
        with pytest.raises(EOFError):
            await asyncio.to_thread(engine.receive, block=True)

    run_ends(main)


def test_messages_sent_before_the_end_are_received() -> None:
    async def engine_ends() -> None:
        here, there = socket.socketpair()
        inbox: asyncio.Queue[bytes] = asyncio.Queue()
        client = await MessageTransport.open(here, inbox.put_nowait)
        with there:
            EngineTransport(there).send(b"last message")
            there.shutdown(socket.SHUT_RDWR)  # as when its process ends
            await client.closed
        assert inbox.get_nowait() == b"last message"
        client.send(b"dropped")
        client.close()

    async def front_end_ends(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        client.send(b"last message")
        client.close()
        assert await asyncio.to_thread(engine.receive, block=True) == b"last message"
        with pytest.raises(EOFError):
            await asyncio.to_thread(engine.receive, block=True)
        engine.send(b"dropped")

    asyncio.run(asyncio.wait_for(engine_ends(), 30))
    run_ends(front_end_ends)


def test_a_closed_front_end_with_unread_messages_ends_the_reading() -> None:
    """The kernel reports a reset connection, not an end of file."""
    for _ in range(20):
        here, there = socket.socketpair()
        with there:
            engine = EngineTransport(there)
            engine.send(b"unread")
            here.close()
            engine.send(b"dropped")
            with pytest.raises(EOFError):
                engine.receive(block=True)


def test_a_full_socket_blocks_the_engine() -> None:
    """No message is dropped, and memory does not grow."""

    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        count, sent = 20_000, [0]

        def other() -> None:
            for number in range(count):
                engine.send(b"%d" % number)
                sent[0] += 1

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(0.5)  # the loop is blocked
        assert 0 < sent[0] < count
        assert [int(await inbox.get()) for _ in range(count)] == list(range(count))

    run_ends(main)


def test_a_token_that_is_read_wakes_no_engine_thread() -> None:
    """Otherwise the thread that waits for requests runs after each token, often on the core that computes the next
    one.
    """
    here, there = socket.socketpair()
    others = set(threading.enumerate())
    with here, there:
        engine = EngineTransport(there)
        (reader,) = set(threading.enumerate()) - others
        before = _times_asleep(reader)
        for _ in range(200):
            engine.send(b"token")
            here.recv(64)
            time.sleep(0.001)  # time for it to wake up and block again
        assert _times_asleep(reader) - before < 20  # 200 for a thread blocked in recv


def _times_asleep(thread: threading.Thread) -> int:
    """Number of times that a thread has blocked so far."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_transports_of_other_event_loops_are_accepted() -> None:
    """uvloop's are not of asyncio's class."""

    class Other:
        written = b""

        def write(self, data: bytes) -> None:
            self.written += data

    async def main() -> None:
        client, other = MessageTransport(lambda data: None), Other()
        client.connection_made(other)  # type: ignore[arg-type]
        client.send(b"word")
        assert other.written == struct.pack("<Q", 4) + b"word"

    asyncio.run(main())


def test_a_message_over_the_limit_closes_the_transport() -> None:
    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        client.max_bytes = 100
        engine.send(b"x" * 100)
        assert await inbox.get() == b"x" * 100
        engine.send(b"x" * 101)
        await asyncio.wait({client.closed})
        assert str(client.closed.exception()) == "a message of 101 bytes, over the limit of 100"

    run_ends(main)


def test_a_reply_is_sent_while_the_engine_is_busy() -> None:
    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        engine.reply_at_once(b"ping", lambda: b"pong")
        client.send(b"ping")
        client.send(b"word")
        assert await inbox.get() == b"pong"  # nothing calls `receive`
        assert await asyncio.to_thread(engine.receive, block=True) == b"word"
        assert engine.receive(block=True, timeout_s=0.01) is None

    run_ends(main)


# -- outputs: whole answers as one message, streams as many as can be read ---------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2))),
    st.lists(st.sampled_from((0.0, 0.001, 0.004, 0.5)), min_size=1),
)
def test_tokens_are_sent_once_and_in_order(steps: list[tuple[str, list[int], int]], waits: list[float]) -> None:
    """a and b request whole answers, d has a stop string, c has no options; outputs are grouped by step."""
    now = [0.0]
    coalescer = OutputCoalescer(lambda: now[0])
    for request in (
        asked("a", whole=True),
        asked("b", whole=True),
        asked("c"),
        asked("d", stop=("end",)),
    ):
        coalescer.add(request)
    expected: dict[str, list[int]] = {"a": [], "b": [], "c": [], "d": []}
    group: list[RequestOutput] = []
    sent_now: list[RequestOutput] = []
    for (name, tokens, ends_group), wait in zip(steps, itertools.cycle(waits), strict=False):
        now[0] += wait
        expected[name] += tokens
        group.append(RequestOutput(request_id=name, token_ids=tuple(tokens)))
        if ends_group:
            sent_now += coalescer.coalesce(group)
            group.clear()
    sent_now += coalescer.coalesce(group)
    sent_now += coalescer.flush()
    assert all(output.request_id in "cd" for output in sent_now)
    sent_now += coalescer.coalesce(RequestOutput(request_id=name, finish_reason="length") for name in expected)
    for name, tokens in expected.items():
        mine = [output for output in sent_now if output.request_id == name]
        assert [token for output in mine for token in output.token_ids] == tokens
        assert mine[-1].finish_reason == "length"
        assert name in "cd" or len(mine) == 1


def test_scores_and_errors_stay_with_their_answer_and_ids_can_be_reused() -> None:
    coalescer = OutputCoalescer()
    coalescer.add(asked("a", whole=True))
    score = TokenScore(-0.5, ())
    assert coalescer.coalesce([RequestOutput(request_id="a", token_ids=(1,), scores=(score,))]) == ()
    error = ErrorValue.of(StepFailed("the step failed"))
    (last,) = coalescer.coalesce([RequestOutput(request_id="a", finish_reason="error", error=error)])
    assert last.token_ids == (1,) and last.scores == (score,) and last.error == error
    again = RequestOutput(request_id="a", token_ids=(2,))
    assert coalescer.coalesce([again]) == (again,)


def test_a_stream_of_short_steps_is_sent_at_its_pace() -> None:
    """Its first tokens and its end are sent at once; the others at its pace, minus the last step's length. A stream
    with stop strings has its own pace, and flushes the other streams.
    """
    for stop, pace_s, places in (((), PACE_S, [0, 18, 36]), (("end",), SEARCH_PACE_S, [0, 4, 8, 12, 16, 20])):
        now = [0.0]
        coalescer = OutputCoalescer(lambda now=now: now[0])  # type: ignore[misc]
        coalescer.add(asked("a", stop=stop))
        coalescer.add(asked("beside"))
        sent: dict[str, list[list[int]]] = {"a": [], "beside": []}
        sent_s: list[float] = []
        at: list[int] = []
        for number in range(places[-1] + 3):
            now[0] += 0.0022
            if sent_now := coalescer.coalesce([output_of("a", number), output_of("beside", number)]):
                at.append(number)
                sent_s.append(now[0])
            for output in sent_now:
                sent[output.request_id].append(list(output.token_ids))
        assert at == places and all(b - a <= pace_s for a, b in itertools.pairwise(sent_s))
        assert sent["a"] == sent["beside"] == [list(range(a + 1, b + 1)) for a, b in itertools.pairwise([-1, *at])]
        end = RequestOutput(request_id="a", token_ids=(99,), finish_reason="length")
        (last, beside) = coalescer.coalesce([end])
        assert last.token_ids == (at[-1] + 1, at[-1] + 2, 99) and last.finish_reason == "length"
        assert beside.token_ids == (at[-1] + 1, at[-1] + 2)


def test_the_search_pace_ends_with_the_last_stream_with_stop_strings() -> None:
    now = [0.0]
    coalescer = OutputCoalescer(lambda: now[0])
    coalescer.add(asked("searched", stop=("end",)))
    coalescer.coalesce([output_of("searched", 0), output_of("a", 0)])
    coalescer.coalesce([RequestOutput(request_id="searched", finish_reason="stop")])
    for _ in range(3):
        now[0] += SEARCH_PACE_S
        assert coalescer.coalesce([output_of("a", 1)]) == ()
    now[0] += SEARCH_PACE_S
    assert coalescer.coalesce([output_of("a", 1)]) == (output_of("a", 1, 1, 1, 1),)


def test_a_stream_of_long_steps_is_sent_after_each_step() -> None:
    now = [0.0]
    coalescer = OutputCoalescer(lambda: now[0])
    for number in range(5):
        now[0] += PACE_S
        assert coalescer.coalesce([output_of("a", number)]) == (output_of("a", number),)


def test_each_message_includes_the_held_tokens_of_all_streams() -> None:
    """The reader wakes up anyway, so it gets everything; and all tokens are flushed before a long step."""
    coalescer = OutputCoalescer(lambda: 0.0)
    coalescer.add(asked("whole", whole=True))
    for name in "ab":
        assert coalescer.coalesce([output_of(name, 0)]) == (output_of(name, 0),)
    assert coalescer.coalesce([output_of("a", 1), output_of("b", 1), output_of("whole", 1)]) == ()
    assert coalescer.coalesce([output_of("a", 2), output_of("new", 1)]) == (
        output_of("new", 1),
        output_of("a", 1, 2),
        output_of("b", 1),
    )
    assert coalescer.coalesce([output_of("b", 2)]) == ()
    assert coalescer.flush() == (output_of("b", 2),) and coalescer.flush() == ()


def asked(name: str, *, whole: bool = False, stop: tuple[str, ...] = ()) -> Request:
    return Request(request_id=name, prompt_ids=(1,), sampling=SamplingParams(stop=stop), whole=whole)


def output_of(name: str, *tokens: int) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=tokens)


# -- pieces of trainings while the engine is idle ----------------------------------------------------------------------


class InMemory:
    """Messages in memory. `receive` that would block raises, unless it has a time limit."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.blocked: list[float | None] = []
        self.sent: list[Any] = []
        self.num_wakes = 0

    def wake(self) -> None:
        self.num_wakes += 1

    def reply_at_once(self, message: bytes, make_reply: Any) -> None: ...

    @property
    def has_message(self) -> bool:
        return bool(self.waiting)

    def post(self, message: messages.ToEngine) -> None:
        self.waiting.append(messages.encode(message))

    def send(self, data: bytes) -> None:
        self.sent.append(messages.decode_from_engine(data))

    def receive(self, *, block: bool, timeout_s: float | None = None) -> bytes | None:
        if self.waiting:
            return self.waiting.popleft()
        if block:
            self.blocked.append(timeout_s)
            if timeout_s is None:
                raise EOFError
        return None


class Trainings:
    """20 pieces. The promise forbids the first one once."""

    def __init__(self, transport: InMemory, log: list[str]) -> None:
        self.wake = transport.wake
        self.num_pieces = 0
        self.retry_s: float | None = None
        self._transport = transport
        self._log = log

    def advance(self) -> bool:
        if self.retry_s is None and not self.num_pieces:
            self.retry_s = 0.25
            return False
        self.retry_s = None
        if self.num_pieces == 20:
            return False
        self.num_pieces += 1
        self._log.append(f"piece {self.num_pieces}")
        if self.num_pieces in (5, 8):
            self._transport.post(messages.Add(Request(request_id=f"r{self.num_pieces}", prompt_ids=(1,))))
        return True

    def statuses(self) -> tuple[Any, ...]:
        return ()


class IdleEngine:
    """Each request takes two steps."""

    alarm = None

    def __init__(self, transport: InMemory) -> None:
        self.log: list[str] = []
        trainings = Trainings(transport, self.log)
        self.parts = SimpleNamespace(trainings=trainings, other_work=trainings)
        self.left: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, request: Request) -> None:
        self.log.append(f"add {request.request_id}")
        self.left[request.request_id] = 2

    def step(self) -> tuple[RequestOutput, ...]:
        self.log.append("step")
        self.parts.other_work.wake()  # as a client's call that comes during the step
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return ()

    def version_of(self, request_id: str) -> None: ...

    def load(self) -> None: ...

    def check_ranks(self) -> None: ...

    def close(self) -> tuple[RequestOutput, ...]:
        return ()


def test_messages_and_work_take_turns() -> None:
    """A message is handled after the piece in which it came, and work that came during a step runs after it: a message
    that only wakes the loop would let a message, and thus another step, come first.
    """
    transport = InMemory()
    engine = IdleEngine(transport)
    EngineWorker(engine, transport).loop()  # type: ignore[arg-type]
    assert transport.blocked == [0.25, None], "the loop must wait for the promise, and block when no piece remains"
    log = engine.log
    assert log.index("add r5") == log.index("piece 5") + 1
    assert log.index("add r8") == log.index("piece 8") + 1
    assert log.count("step") == 4 and log[-1] == "piece 20"
    between = log[log.index("add r5") : log.index("add r8")]
    assert between.count("step") == 2 and "piece 6" in between

    steps = [place for place, what in enumerate(engine.log) if what == "step"]
    assert steps and all(engine.log[place + 1].startswith("piece") for place in steps if place + 1 < len(engine.log))
    assert transport.num_wakes == 0


def test_work_that_comes_while_the_engine_sleeps_wakes_it() -> None:
    transport = InMemory()
    engine = IdleEngine(transport)
    work = engine.parts.other_work
    inner = transport.receive

    def receive(*, block: bool, timeout_s: float | None = None) -> bytes | None:
        if block:
            work.wake()
        return inner(block=block, timeout_s=timeout_s)

    transport.receive = receive  # type: ignore[method-assign]
    EngineWorker(engine, transport).loop()  # type: ignore[arg-type]
    assert transport.num_wakes == len(transport.blocked) == 2


# -- reports of the load -----------------------------------------------------------------------------------------------

IDLE = EngineLoad(free_blocks=10, total_blocks=10, num_running=0, num_waiting=0)


class Watched:
    """A reporter and its reader, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.load = IDLE
        self.sent: list[LoadReport] = []
        self.seen: list[EngineLoad] = []
        self.reporter = LoadReporter(lambda: self.load, self._send, lambda: self.now_s)
        self._reader = WatchedLoad(lambda report: self.seen.append(report.load))

    def _send(self, report: LoadReport) -> None:
        found = decode_from_engine(encode(report))
        assert isinstance(found, LoadReport)
        self.sent.append(found)
        self._reader.receive(found)


def test_random_changes_amount_to_the_engines_load() -> None:
    draws = random.Random(0)
    watched = Watched()
    watched.reporter.poll()
    assert not watched.sent  # not watched yet
    watched.reporter.watch(0.1)
    for _ in range(2_000):
        watched.now_s += draws.choice([0.001, 0.05])
        resident = dict(watched.load.resident)
        if draws.random() < 0.3:
            name = f"a{draws.randrange(20)}"
            if draws.random() < 0.5:
                resident.pop(name, None)
            else:
                resident[name] = f"v{draws.randrange(3)}"
        watched.load = msgspec.structs.replace(
            watched.load, resident=resident, free_blocks=draws.randrange(3), loading=tuple(sorted(resident))[:1]
        )
        num_sent = len(watched.sent)
        watched.reporter.poll()
        if len(watched.sent) > num_sent:
            assert watched.seen[-1] == watched.load
    assert len(watched.sent) <= watched.now_s / 0.1 + 1
    assert len(watched.sent) > 0.5 * watched.now_s / 0.1
    assert [report.is_complete for report in watched.sent].count(True) == 1
    # The adapters of most reports are a part of those on the device.
    assert sum(len(report.load.resident) for report in watched.sent) < 3 * len(watched.sent)


def test_a_new_reader_gets_everything_and_nothing_before() -> None:
    watched = Watched()
    watched.load = msgspec.structs.replace(IDLE, resident={"a": "1", "b": "1"})
    watched.reporter.watch(0.1)
    watched.reporter.poll()
    later: list[EngineLoad] = []
    reader = WatchedLoad(lambda report: later.append(report.load))
    watched.now_s = 1.0
    watched.load = msgspec.structs.replace(IDLE, resident={"a": "1"})
    watched.reporter.poll()
    reader.receive(watched.sent[-1])
    assert not later  # a change of a load that this reader does not know
    watched.reporter.watch(0.1)
    watched.reporter.poll()
    reader.receive(watched.sent[-1])
    assert later == [watched.load]


def test_a_change_before_a_report_is_due_is_reported_when_it_is() -> None:
    watched = Watched()
    watched.reporter.watch(0.1)
    watched.reporter.poll()
    assert watched.reporter.wait_s is None
    watched.now_s, watched.load = 0.03, msgspec.structs.replace(IDLE, num_running=1)
    watched.reporter.poll()
    assert len(watched.sent) == 1 and watched.reporter.wait_s is not None
    assert abs(watched.reporter.wait_s - 0.07) < 1e-9
    watched.now_s = 0.1
    watched.reporter.poll()
    assert watched.seen[-1].num_running == 1 and watched.reporter.wait_s is None


def test_an_engine_process_reports_its_load_and_signs_of_life(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await EngineClient.start(EngineConfig(model="scripted"), command=ENGINE_COMMAND)
        seen: list[tuple[float, int, EngineLoad]] = []
        engine.ping()  # possibly before its loop begins
        engine.watch_load(0.05, lambda found: seen.append((time.monotonic(), found.num_taken, found.load)))
        await engine.load_adapter("signs", write_adapter(tmp_path / "signs"))
        await engine.pin_adapter("signs", True)
        prompt = tuple(b"say:" + b"x" * 200)
        request = Request(request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_tokens=300))
        engine.ping()
        async for _ in engine.generate(request):
            pass
        assert engine.pong is not None and engine.pong.step_s < 1
        await asyncio.sleep(0.2)
        loads = [load for *_, load in seen]
        assert {load.num_running for load in loads} == {0, 1} and loads[-1].num_running == 0
        assert list(loads[-1].resident) == ["signs"] and loads[-1].resident["signs"]
        times = [at for at, *_ in seen]
        assert seen[0][1] == 0 and seen[-1][1] == 1
        assert all(later - earlier > 0.03 for earlier, later in itertools.pairwise(times))
        number = len(seen)
        await asyncio.sleep(0.2)
        assert len(seen) == number  # an idle engine reports nothing
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
