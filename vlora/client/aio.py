"""The asyncio client: the same calls as `Client`, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from vlora.client.calls import Call
from vlora.client.connection import ServerConnection
from vlora.client.frame_stream import AsyncFrameStream, FrameStream
from vlora.client.sync import TIMEOUT_S, Client
from vlora.client.text_stream import TextStream
from vlora.client.values import Answer, StreamPart
from vlora.errors import DeadlineMissed, VLoraError

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The asyncio form of a method of `Client` that waits for a value: sends the same call and awaits it."""
    make: Callable[..., Call[T]] = method.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(make)
    async def ask(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._wait(make(self, *args, **kwargs))

    return ask


def _opened(
    method: Callable[Concatenate[Client, P], FrameStream],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncFrameStream]]:
    """The asyncio form of `Client.open_stream`."""
    make: Callable[..., Call[str]] = method.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(make)
    async def open_stream(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> AsyncFrameStream:
        return AsyncFrameStream(await self._wait(make(self, *args, **kwargs)), self._wait, self._timeout_s)

    return open_stream


def _streamed(
    method: Callable[Concatenate[Client, P], TextStream],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[str | Answer]]:
    """The asyncio form of `Client.stream`: yields pieces of text as they arrive, then the complete Answer."""
    make: Callable[..., Call[StreamPart]] = method.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(make)
    async def stream(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[str | Answer]:
        connection = await self._connection()
        call = connection.numbered(make(self, *args, **kwargs))
        arrived: asyncio.Queue[StreamPart | Future[StreamPart]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(part: StreamPart | Future[StreamPart]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may already be closed
                loop.call_soon_threadsafe(arrived.put_nowait, part)

        def on_value(part: StreamPart) -> bool:
            if part.answer is None:
                put(part)
            return part.answer is None

        finished = False
        try:
            future = await self._send(connection, call, on_value)
            future.add_done_callback(put)
            while True:
                async with asyncio.timeout(self._timeout_s):
                    part = await arrived.get()
                if isinstance(part, Future):
                    break
                yield part.text
            finished = True
            answer = part.result().answer
            assert answer is not None
            yield answer
        except TimeoutError as error:
            raise DeadlineMissed(f"no response from the server within {self._timeout_s:g} s") from error
        finally:
            if not finished:
                connection.abandon(call)

    return stream


class AsyncClient:
    """As `Client`. Cancelling a task that awaits an answer cancels the request on the server."""

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._client = Client(host, port, timeout_s=timeout_s, token=token, tls=tls)
        self._timeout_s = timeout_s

    generate = _awaited(Client.generate)
    stream = _streamed(Client.stream)
    ask_head = _awaited(Client.ask_head)
    ask_heads = _awaited(Client.ask_heads)
    open_stream = _opened(Client.open_stream)
    adapters = _awaited(Client.adapters)
    load_adapter = _awaited(Client.load_adapter)
    unload_adapter = _awaited(Client.unload_adapter)
    pin_adapter = _awaited(Client.pin_adapter)
    train = _awaited(Client.train)
    trainings = _awaited(Client.trainings)
    cancel_training = _awaited(Client.cancel_training)
    correct = _awaited(Client.correct)
    learning = _awaited(Client.learning)
    promote = _awaited(Client.promote)
    roll_back = _awaited(Client.roll_back)
    stats = _awaited(Client.stats)
    cluster = _awaited(Client.cluster)
    cluster_adapters = _awaited(Client.cluster_adapters)
    drain_replica = _awaited(Client.drain_replica)
    resume_replica = _awaited(Client.resume_replica)
    scale = _awaited(Client.scale)

    async def close(self) -> None:
        """As `Client.close`."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _connection(self) -> ServerConnection:
        return await asyncio.to_thread(self._client.connection)

    async def _send(
        self, connection: ServerConnection, call: Call[T], on_value: Callable[[T], bool] | None = None
    ) -> Future[T]:
        """Send a call in a thread, because sending megabytes of images may block. A task cancelled meanwhile waits
        until the call is sent, so that the request can be cancelled on the server.
        """
        sent = asyncio.create_task(asyncio.to_thread(connection.start, call, on_value))
        try:
            return await asyncio.shield(sent)
        except asyncio.CancelledError:
            with contextlib.suppress(VLoraError):
                await sent
            raise

    async def _wait(self, call: Call[T]) -> T:
        connection = await self._connection()
        call = connection.numbered(call)
        try:
            future = await self._send(connection, call)
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            connection.abandon(call)
            raise DeadlineMissed(f"no answer from the server within {self._timeout_s:g} s") from error
        except asyncio.CancelledError:
            connection.abandon(call)
            raise
