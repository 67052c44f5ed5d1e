"""The asyncio client: the same calls as `Client`, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, TypeVar

from vlora.client import calls
from vlora.client.aio_frame_stream import AsyncFrameStream
from vlora.client.calls import Adapter, Call, Image, Visual
from vlora.client.connection import ServerConnection
from vlora.client.own_question import head_of_question
from vlora.client.sync import TIMEOUT_S, Client, abandon
from vlora.client.values import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    Answer,
    HeadOutcome,
    HeadResult,
    StreamOptions,
    StreamPart,
    TextQuestion,
)
from vlora.errors import DeadlineMissed, VLoraError
from vlora.types import AdapterStatus, EngineStats, TrainingStatus
from vlora.types.learning import Correction, LearningStatus
from vlora.types.replicas import AdapterPlace, ClusterStatus

T = TypeVar("T")


class AsyncClient:
    """As `Client`. Cancelling a task that awaits an answer cancels the request on the server."""

    def __init__(
        self,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        *,
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._client = Client(host, port, timeout_s=timeout_s, token=token, tls=tls)
        self._timeout_s = timeout_s

    async def generate(
        self,
        question: str,
        images: Sequence[Visual] = (),
        adapter: Adapter | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> Answer:
        """As `Client.generate`."""
        connection = await self._connection()
        call_id = connection.new_id()
        call = calls.generate(call_id, question, images, adapter, max_latency_s, max_ttft_s, priority, sampling)
        return await self._wait(connection, call, call_id)

    async def stream(
        self,
        question: str,
        images: Sequence[Visual] = (),
        adapter: Adapter | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> AsyncIterator[str | Answer]:
        """Yields pieces of text as they arrive, then the complete Answer. Closing the iterator early cancels the
        request.
        """
        connection = await self._connection()
        call_id = connection.new_id()
        call = calls.stream(call_id, question, images, adapter, max_latency_s, max_ttft_s, priority, sampling)
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
                abandon(connection, call_id)

    async def ask_head(
        self,
        images: Sequence[Image],
        adapter: str,
        head: str,
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
    ) -> HeadResult:
        """As `Client.ask_head`."""
        connection = await self._connection()
        call_id = connection.new_id()
        return await self._wait(
            connection, calls.ask_head(call_id, images, adapter, head, max_latency_s, priority), call_id
        )

    async def ask_heads(
        self,
        images: Sequence[Image],
        heads: Sequence[tuple[str, str]],
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
    ) -> tuple[HeadOutcome, ...]:
        """As `Client.ask_heads`."""
        connection = await self._connection()
        call_id = connection.new_id()
        return await self._wait(connection, calls.ask_heads(call_id, images, heads, max_latency_s, priority), call_id)

    async def head_of(self, question: str, adapter: str | None, num_images: int = 1) -> str | None:
        """As `Client.head_of`."""
        return None if adapter is None else head_of_question(await self.adapters(), question, num_images, adapter)

    async def open_stream(
        self,
        *,
        adapter: str | None = None,
        head: str | None = None,
        heads: Sequence[tuple[str, str]] = (),
        questions: Sequence[TextQuestion] = (),
        max_latency_s: float | None = None,
        fps: float | None = None,
        drop: Literal["newest", "none"] = "newest",
        priority: int = 0,
    ) -> AsyncFrameStream:
        """As `Client.open_stream`."""
        options = StreamOptions(
            heads=calls.stream_heads(adapter, head, heads),
            questions=calls.stream_questions(questions),
            max_latency_s=max_latency_s,
            fps=fps,
            drop=drop,
            priority=priority,
        )
        stream_id = await self._wait(await self._connection(), calls.open_frames(options))

        async def ask(call: Call[Any]) -> Any:
            return await self._wait(await self._connection(), call)

        return AsyncFrameStream(stream_id, ask, self._timeout_s)

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        """As `Client.adapters`."""
        return await self._wait(await self._connection(), calls.adapters())

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterStatus:
        """As `Client.load_adapter`."""
        return await self._wait(await self._connection(), calls.load_adapter(name, path))

    async def unload_adapter(self, name: str, *, drain: bool = False) -> None:
        """As `Client.unload_adapter`."""
        await self._wait(await self._connection(), calls.unload_adapter(name, drain))

    async def pin_adapter(self, name: str, pinned: bool = True) -> AdapterStatus:
        """As `Client.pin_adapter`."""
        return await self._wait(await self._connection(), calls.pin_adapter(name, pinned))

    async def train(self, plan: str | os.PathLike[str]) -> tuple[TrainingStatus, ...]:
        """As `Client.train`."""
        return await self._wait(await self._connection(), calls.train(plan))

    async def trainings(self) -> tuple[TrainingStatus, ...]:
        """As `Client.trainings`."""
        return await self._wait(await self._connection(), calls.trainings())

    async def cancel_training(self, name: str) -> TrainingStatus:
        """As `Client.cancel_training`."""
        return await self._wait(await self._connection(), calls.cancel_training(name))

    async def correct(self, answer: Answer | str, label: str) -> Correction:
        """As `Client.correct`."""
        return await self._wait(await self._connection(), calls.correct(answer, label))

    async def learning(self) -> tuple[LearningStatus, ...]:
        """As `Client.learning`."""
        return await self._wait(await self._connection(), calls.learning())

    async def promote(
        self,
        name: str,
        *,
        version: str | None = None,
        path: str | os.PathLike[str] | None = None,
        force: bool = False,
    ) -> LearningStatus:
        """As `Client.promote`."""
        return await self._wait(await self._connection(), calls.promote(name, version, path, force))

    async def roll_back(self, name: str, version: str | None = None) -> LearningStatus:
        """As `Client.roll_back`."""
        return await self._wait(await self._connection(), calls.roll_back(name, version))

    async def stats(self) -> EngineStats:
        """As `Client.stats`."""
        return await self._wait(await self._connection(), calls.stats())

    async def cluster(self) -> ClusterStatus:
        """As `Client.cluster`."""
        return await self._wait(await self._connection(), calls.cluster())

    async def cluster_adapters(self) -> tuple[AdapterPlace, ...]:
        """As `Client.cluster_adapters`."""
        return await self._wait(await self._connection(), calls.cluster_adapters())

    async def drain_replica(self, name: str, *, wait_s: float = 5.0) -> bool:
        """As `Client.drain_replica`."""
        return await self._wait(await self._connection(), calls.drain_replica(name, wait_s))

    async def resume_replica(self, name: str) -> None:
        """As `Client.resume_replica`."""
        await self._wait(await self._connection(), calls.resume_replica(name))

    async def scale(self, number: int | Literal["auto"], *, wait_s: float = 5.0) -> bool:
        """As `Client.scale`."""
        return await self._wait(await self._connection(), calls.scale(number, wait_s))

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

    async def _wait(self, connection: ServerConnection, call: Call[T], call_id: int | None = None) -> T:
        try:
            future = await self._send(connection, call)
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if call_id is not None:
                abandon(connection, call_id)
            raise DeadlineMissed(f"no answer from the server within {self._timeout_s:g} s") from error
        except asyncio.CancelledError:
            if call_id is not None:
                abandon(connection, call_id)
            raise
