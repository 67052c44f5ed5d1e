"""What both clients have in common: their connection, a call, a stream of text. Written once, as coroutines.

`AsyncClient` runs them on an event loop. In `Client` the same coroutines wait by blocking, so that they never suspend
and `run` completes them in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from vlora.client.connection import ServerConnection, addresses_of
from vlora.client.requests import Generate
from vlora.client.sockets import client_context
from vlora.client.values import DEFAULT_HOST, DEFAULT_PORT, Answer, StreamPart
from vlora.errors import DeadlineMissed, Disconnected, VLoraError
from vlora.operations import Operation

T = TypeVar("T")

TIMEOUT_S = 150.0  # above the server's own limit, so that the server's more specific error arrives first


class LoopMailbox:
    def __init__(self) -> None:
        self._values: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may already be closed
            self._loop.call_soon_threadsafe(self._values.put_nowait, value)

    async def get(self, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            return await self._values.get()


class OnLoop:
    """How coroutines wait on an event loop. Waits with a limit raise TimeoutError."""

    lock = asyncio.Lock
    mailbox = LoopMailbox
    sleep = staticmethod(asyncio.sleep)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block. It is completed even if its caller is cancelled."""
        running = asyncio.create_task(asyncio.to_thread(function, *args))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            with contextlib.suppress(VLoraError):
                await running
            raise

    async def uninterrupted(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that goes on if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def result(self, future: Future[T], timeout_s: float) -> T:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)


class Closing:
    """Closed at the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ThreadLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._lock.release()


class ThreadMailbox:
    def __init__(self) -> None:
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = self._values.put

    async def get(self, timeout_s: float) -> Any:
        try:
            return self._values.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TimeoutError from error


class Blocking:
    """As `OnLoop`, in the thread that calls."""

    lock = ThreadLock
    mailbox = ThreadMailbox

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    async def uninterrupted(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    async def result(self, future: Future[T], timeout_s: float) -> T:
        return future.result(timeout_s)


Waiting = OnLoop | Blocking


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits by `Blocking` only."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a blocking coroutine has suspended")


class Caller:
    """The connection of a client. Connects at the first call, and again after a connection broke."""

    waiting: Waiting

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        servers: Sequence[str] = (),
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if servers:
            addresses = addresses_of(servers, "an address of a server")
        elif host is not None or port is not None:
            addresses = [(host or DEFAULT_HOST, port or DEFAULT_PORT)]
        else:
            given = os.environ.get("VLORA_SERVER") or f"{DEFAULT_HOST}:{DEFAULT_PORT}"
            addresses = addresses_of(given.split(","), "VLORA_SERVER")
            token = token or os.environ.get("VLORA_TOKEN") or None
            files = (os.environ.get(f"VLORA_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
            tls = tls or client_context(*files)
        self._addresses = deque(addresses)
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._live: ServerConnection | None = None

    def connection(self) -> ServerConnection:
        """The live connection; connects if there is none. Raises Disconnected."""
        with self._lock:
            if self._live is None or self._live.closed:
                self._live = self._connected()
            return self._live

    def _connected(self) -> ServerConnection:
        """Connect to the first server that answers, beginning with the one that did before."""
        failures = []
        for _ in range(len(self._addresses)):
            try:
                return ServerConnection(*self._addresses[0], self._token, self._tls)
            except (Disconnected, DeadlineMissed) as error:
                failures.append(error)
                self._addresses.rotate(-1)
        raise failures[0] if len(failures) == 1 else Disconnected("; ".join(map(str, failures)))

    async def _connection(self) -> ServerConnection:
        live = self._live
        return live if live is not None and not live.closed else await self.waiting.run(self.connection)

    async def _call(self, operation: Operation) -> Any:
        """The result of an operation. Abandoning the wait cancels a request on the server."""
        connection = await self._connection()
        call = connection.numbered(operation)
        try:
            future = await self.waiting.run(connection.start, call)
            return await self.waiting.result(future, self._timeout_s)
        except TimeoutError as error:
            connection.abandon(call)
            raise DeadlineMissed(f"no answer from the server within {self._timeout_s:g} s") from error
        except (asyncio.CancelledError, KeyboardInterrupt):
            connection.abandon(call)
            raise

    async def _begin(self, call: Generate) -> TextParts:
        return await TextParts(await self._connection(), call, self.waiting, self._timeout_s).begin()

    def _close(self) -> None:
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.close()


class TextParts:
    """The parts of a streamed answer: text, then the complete Answer."""

    def __init__(self, connection: ServerConnection, call: Generate, waiting: Waiting, timeout_s: float) -> None:
        self._connection = connection
        self._call = connection.numbered(call)
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._arrived = waiting.mailbox()
        self.ended = False

    async def begin(self) -> Self:
        try:
            future = await self._waiting.run(self._connection.start, self._call, self._on_part)
        except BaseException:
            self.close()
            raise
        future.add_done_callback(self._arrived.put)
        return self

    async def next(self) -> str | Answer:
        try:
            part: StreamPart | Future[StreamPart] = await self._arrived.get(self._timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise DeadlineMissed(f"no response from the server within {self._timeout_s:g} s") from error
            raise
        if isinstance(part, StreamPart):
            return part.text
        self.ended = True
        answer = part.result().answer
        assert answer is not None
        return answer

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self._connection.abandon(self._call)

    def _on_part(self, part: StreamPart) -> bool:
        if part.answer is None:
            self._arrived.put(part)
        return part.answer is None
