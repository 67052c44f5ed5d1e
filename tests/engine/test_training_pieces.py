"""The engine's process runs pieces of trainings while it is idle, and handles a message after one piece at most."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from vlora.engine.ipc import messages
from vlora.engine.ipc.worker import EngineWorker
from vlora.types import Request, RequestOutput


class Transport:
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

    def __init__(self, transport: Transport, log: list[str]) -> None:
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


class Engine:
    """Each request takes two steps."""

    alarm = None

    def __init__(self, transport: Transport) -> None:
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
    transport = Transport()
    engine = Engine(transport)
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
    transport = Transport()
    engine = Engine(transport)
    work = engine.parts.other_work
    inner = transport.receive

    def receive(*, block: bool, timeout_s: float | None = None) -> bytes | None:
        if block:
            work.wake()
        return inner(block=block, timeout_s=timeout_s)

    transport.receive = receive  # type: ignore[method-assign]
    EngineWorker(engine, transport).loop()  # type: ignore[arg-type]
    assert transport.num_wakes == len(transport.blocked) == 2
