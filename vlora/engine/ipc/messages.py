"""Messages between an engine process and its client: frozen structs as msgpack. No pickle, no live references.

The client's end of their socket is a `MessageTransport` (`vlora.wire.framing`), the engine's an `EngineTransport`. The
socket is one of a plain pair: the latency of a token is little more than thread wake-ups, and here only the reader
wakes up. If either end is closed, for any reason, the other end sees it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from vlora.config import EngineConfig, Token
from vlora.engine.operations import EngineOperation
from vlora.engine.snapshot import EngineLoad
from vlora.types import ErrorValue, Request, RequestOutput
from vlora.wire.framing import HEAD, pack

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: build the engine. Answered by Ready, or by Failed and the end of the process."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add a request. It is answered by Outputs; a refusal is a finished output with the error."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Call(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """Perform an `Operation`. It is answered by a Reply with the same call_id."""

    call_id: int
    operation: T


class ReplaceBaseTokens(msgspec.Struct, frozen=True, tag=True):
    """Admit clients of the base model with these tokens from now on. It is not answered."""

    tokens: tuple[Token, ...]


class WatchLoad(msgspec.Struct, frozen=True, tag=True):
    """Send a LoadReport now, and after changes at most one in `every_s` seconds."""

    every_s: float


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by Pong at once, even during a step."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Cancel all running requests and end the process."""


ToEngine = Start | Add | Cancel | Call[msgspec.Raw] | ReplaceBaseTokens | WatchLoad | Ping | Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is built.

    Attributes:
        max_context: Maximum tokens of one request, prompt and answer together.
    """

    model: str
    pid: int
    max_context: int
    max_batch_size: int = 1
    block_size: int = 1
    num_blocks: int = 1


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process is about to end, with the cause: a model that cannot be loaded keeps its typed error."""

    error: ErrorValue


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: tuple[RequestOutput, ...]


class Reply(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """The answer to the call with that id: the operation's result, or the error if it was refused."""

    call_id: int
    value: T = None  # type: ignore[assignment]  # with an error
    error: ErrorValue | None = None


class LoadReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine's load, with adapters as changes since the previous report.

    Attributes:
        load: Its `resident` has only the adapters that were loaded or got other content.
        num_taken: Requests added so far, refused ones included: the load includes these.
        num_ended: Of these, requests that have ended. A replica counts both for each of its front ends.
        num_sharing: Front ends of the replica.
        evicted: Names of the adapters that are no longer on the device.
        is_complete: `load.resident` has all adapters: this is the first report after WatchLoad.
    """

    load: EngineLoad
    num_taken: int
    num_ended: int = 0
    num_sharing: int = 1
    evicted: tuple[str, ...] = ()
    is_complete: bool = False


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The process is alive. step_s: for how long the current step has been running; 0 if the engine is idle."""

    step_s: float


FromEngine = Ready | Failed | Outputs | Reply[msgspec.Raw] | LoadReport | Pong

encode = msgspec.msgpack.Encoder().encode
PING = encode(Ping())
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_operation = msgspec.msgpack.Decoder(EngineOperation).decode


_END = bytearray()  # no message is empty
_SHORT = 64  # bytes; longer than messages that are answered at once


class EngineTransport:
    """The engine's end. A thread reads, so that large messages (images) do not delay a step."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._replies: dict[bytes, Callable[[], bytes]] = {}
        self._messages: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="vlora-engine-reader", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Blocks when the socket's buffer is full; data for a closed front end is dropped."""
        with contextlib.suppress(ConnectionError), self._sending:
            self._socket.sendall(pack(data))

    def reply_at_once(self, message: bytes, make_reply: Callable[[], bytes]) -> None:
        """Answer this message in the reading thread, even during a step, with what `make_reply` returns there."""
        self._replies[message] = make_reply

    def receive(self, *, block: bool, timeout_s: float | None = None) -> bytearray | None:
        """The next message; None if there is none, and after `wake`. Raises EOFError when the front end has closed.

        timeout_s: how long to block; None blocks until there is a message.
        """
        try:
            data = self._messages.get(block, timeout_s)
        except queue.Empty:
            return None
        if data == _END:
            raise EOFError
        return data

    @property
    def has_message(self) -> bool:
        return not self._messages.empty()

    def wake(self) -> None:
        """Wake up a blocked `receive`. May be called from any thread."""
        self._messages.put(None)

    def _read(self) -> None:
        # A thread blocked in recv also wakes up when the peer has read sent data: after each token, and often on the
        # core that computes the next one. A thread blocked in poll does not.
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        try:
            while True:
                waiting.poll()
                (size,) = HEAD.unpack(self._exactly(HEAD.size))
                message = self._exactly(size)
                # Most messages are long; their bytes are not copied to look them up.
                if size < _SHORT and (make_reply := self._replies.get(bytes(message))) is not None:
                    self.send(make_reply())
                else:
                    self._messages.put(message)
        except (OSError, EOFError):
            self._messages.put(_END)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:  # one call, unless a signal interrupts it (for example one that suspends the process)
            count = self._socket.recv_into(left, 0, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError
            left = left[count:]
        return data


@dataclasses.dataclass(eq=False)
class LoadReporter:
    """The engine's side. Not used unless a client sends WatchLoad."""

    load: Callable[[], EngineLoad]
    send: Callable[[LoadReport], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._every_s: float | None = None
        self._due_s = 0.0
        self._postponed = False  # the load may have changed before a report was due
        self._sent: EngineLoad | None = None
        self._num_taken = 0

    def count_request(self) -> None:
        self._num_taken += 1

    def watch(self, every_s: float) -> None:
        """Send a complete report with the next `poll`, and then at most one in `every_s` seconds."""
        self._every_s, self._due_s, self._sent = every_s, 0.0, None

    def poll(self) -> None:
        """Send a report if one is due and the load has changed. Called between two steps."""
        if self._every_s is None:
            return
        now = self.clock()
        self._postponed = now < self._due_s
        if self._postponed:
            return
        load, before = self.load(), self._sent
        if load == before:
            return
        self._due_s, self._sent = now + self._every_s, load
        known = {} if before is None else before.resident
        changed = {name: version for name, version in load.resident.items() if known.get(name) != version}
        self.send(
            LoadReport(
                load=msgspec.structs.replace(load, resident=changed),
                num_taken=self._num_taken,
                evicted=tuple(sorted(known.keys() - load.resident)),
                is_complete=before is None,
            )
        )

    @property
    def wait_s(self) -> float | None:
        """How long an idle engine may sleep before the next `poll`; None if that sends nothing."""
        return max(0.0, self._due_s - self.clock()) if self._postponed else None


class WatchedLoad:
    """The client's side: the load that the reports amount to."""

    def __init__(self, on_change: Callable[[LoadReport], None]) -> None:
        """on_change: called after each report, with all adapters."""
        self._on_change = on_change
        self._resident: dict[str, str] | None = None

    def receive(self, report: LoadReport) -> None:
        """Apply a report. Those before the first complete one are for an earlier client of the engine."""
        if report.is_complete:
            self._resident = {}
        if self._resident is None:
            return
        for name in report.evicted:
            self._resident.pop(name, None)
        self._resident |= report.load.resident
        load = msgspec.structs.replace(report.load, resident=dict(self._resident))
        self._on_change(msgspec.structs.replace(report, load=load))
