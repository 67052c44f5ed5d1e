"""The handles of a stream of frames: one on an event loop, and the blocking one over its coroutines."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self

from vlora.client.calling import Closing, Waiting, run
from vlora.client.inputs import FrameImage, read_frame
from vlora.client.requests import CloseFrames, EndFrames, PullResults, SendFrame
from vlora.client.values import FrameResult
from vlora.errors import DeadlineMissed, Disconnected, VLoraError
from vlora.operations import Operation

WAIT_S = 10.0  # how long the server holds a call that waits for room or for results

RETRY_S = 30.0  # the time that a server keeps a stream without a connection
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class ReconnectBackoff:
    """Increasing pauses between attempts to reconnect, until the stream has expired on the server."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None

    def pause_s(self, error: Disconnected) -> float:
        """Time to wait before the next attempt. Raises the error when no attempts remain."""
        now = time.monotonic()
        # Counted from the first failure, because the server may have held the call for a while before it.
        self._until = self._until or now + RETRY_S
        if now >= self._until:
            raise error
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


class AsyncFrameStream(AsyncIterator[FrameResult]):
    """As `FrameStream`, awaited. A cancelled send may still reach the server; reading can be cancelled."""

    def __init__(
        self, stream_id: str, ask: Callable[[Operation], Awaitable[Any]], waiting: Waiting, timeout_s: float
    ) -> None:
        self.stream_id = stream_id
        self._ask = ask
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._wait_s = min(WAIT_S, timeout_s / 2)
        self._num_sent = 0
        self._unread: deque[FrameResult] = deque()
        self._last_read = -1  # which the next pull acknowledges
        self._finished = False
        self._closed = False
        self._sending = waiting.lock()
        self._reading = waiting.lock()

    async def send(self, *images: FrameImage) -> int:
        # A send interrupted halfway would leave its number for another frame.
        return await self._waiting.uninterrupted(self._send(images))

    async def __anext__(self) -> FrameResult:
        async with self._reading:
            while not self._unread:
                if self._finished or self._closed:
                    raise StopAsyncIteration
                try:
                    found = await self._retry(PullResults(self.stream_id, self._last_read, self._wait_s))
                    self._unread.extend(found.results)
                    self._finished = found.finished
                except VLoraError:
                    if not self._closed:
                        raise
            result = self._unread.popleft()
            self._last_read = result.number
            return result

    async def end(self) -> None:
        await self._retry(EndFrames(self.stream_id))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(VLoraError):  # without a connection the server drops the stream itself
                await self._ask(CloseFrames(self.stream_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _send(self, images: tuple[FrameImage, ...]) -> int:
        frame = await self._waiting.run(read_frame, images)
        async with self._sending:
            until = time.monotonic() + self._timeout_s
            while not await self._retry(SendFrame(self.stream_id, self._num_sent, frame, self._wait_s)):
                if time.monotonic() >= until:
                    raise DeadlineMissed(
                        f"frame {self._num_sent} found no room within {self._timeout_s:g} s: read the stream's results "
                        "while sending, or send fewer frames"
                    )
            self._num_sent += 1
            return self._num_sent - 1

    async def _retry(self, call: Operation) -> Any:
        """Repeat a call until it succeeds: calls of a stream are idempotent on the server."""
        retry = ReconnectBackoff()
        while True:
            try:
                return await self._ask(call)
            except Disconnected as error:
                if self._closed:
                    raise
                await self._waiting.sleep(retry.pause_s(error))


class FrameStream(Closing, Iterator[FrameResult]):
    """Sends frames and iterates over one result per frame, in the order of the frames. Created by
    `Client.open_stream`.

    One thread may send while another reads. A broken connection is re-established for up to 30 s without losing or
    repeating a result; then Disconnected is raised. UnknownStream: the server no longer has the stream.
    """

    def __init__(self, frames: AsyncFrameStream) -> None:
        self._frames = frames
        self.stream_id = frames.stream_id

    def send(self, *images: FrameImage) -> int:
        """Send one frame, as many images as its head reads; returns its number, counted from 0.

        Blocks while there is no room: with drop "none" while the server is behind, and always while 256 results are
        unread. Raises DeadlineMissed if no room becomes free within the client's `timeout_s`, BadImage, TooLarge. A
        frame that cannot be decoded raises nothing here; its result contains the error.
        """
        return run(self._frames.send(*images))

    def __next__(self) -> FrameResult:
        """Waits for the next result; stops after the last one once `end` was called, and when the stream is closed."""
        try:
            return run(anext(self._frames))
        except StopAsyncIteration:
            raise StopIteration from None

    def end(self) -> None:
        """Mark the end of the frames: iteration stops after the last frame's result."""
        run(self._frames.end())

    def close(self) -> None:
        """Cancel unanswered frames and discard unread results."""
        run(self._frames.close())
