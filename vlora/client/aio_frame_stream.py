"""The asyncio handle of a stream of frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from vlora.client import calls
from vlora.client.calls import Call, FrameImage
from vlora.client.stream_state import WAIT_S, ReconnectBackoff, SendTimeout, UnreadResults
from vlora.client.values import FrameResult
from vlora.errors import Disconnected, VLoraError


class AsyncFrameStream(AsyncIterator[FrameResult]):
    """As `FrameStream`, awaited. A cancelled send may still reach the server; reading can be cancelled."""

    def __init__(self, stream_id: str, ask: Callable[[Call[Any]], Awaitable[Any]], timeout_s: float) -> None:
        self.stream_id = stream_id
        self._ask = ask
        self._timeout_s = timeout_s
        self._wait_s = min(WAIT_S, timeout_s / 2)
        self._num_sent = 0
        self._unread = UnreadResults()
        self._sending = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._sends: set[asyncio.Task[int]] = set()
        self._closed = False

    async def send(self, *images: FrameImage) -> int:
        """As `FrameStream.send`."""
        # A separate task: a send interrupted halfway would leave its number for another frame.
        task = asyncio.create_task(self._send(images))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)
        return await asyncio.shield(task)

    async def __anext__(self) -> FrameResult:
        """As `FrameStream.__next__`."""
        async with self._reading:
            while not self._unread:
                if self._unread.finished or self._closed:
                    raise StopAsyncIteration
                pull = calls.pull_results(self.stream_id, self._unread.last_read, self._wait_s)
                try:
                    self._unread.add(await self._retry(pull))
                except VLoraError:
                    if not self._closed:
                        raise
            return self._unread.read()

    async def end(self) -> None:
        """As `FrameStream.end`."""
        await self._retry(calls.end_frames(self.stream_id))

    async def close(self) -> None:
        """As `FrameStream.close`."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(VLoraError):
                await self._ask(calls.close_frames(self.stream_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _send(self, images: tuple[FrameImage, ...]) -> int:
        frame = await asyncio.to_thread(calls.read_frame, images)
        async with self._sending:
            timeout = SendTimeout(self._timeout_s)
            while not await self._retry(calls.send_frame(self.stream_id, self._num_sent, frame, self._wait_s)):
                timeout.check(self._num_sent)
            self._num_sent += 1
            return self._num_sent - 1

    async def _retry(self, call: Call[Any]) -> Any:
        retry = ReconnectBackoff()
        while True:
            try:
                return await self._ask(call)
            except Disconnected as error:
                if self._closed:
                    raise
                await asyncio.sleep(retry.pause_s(error))
