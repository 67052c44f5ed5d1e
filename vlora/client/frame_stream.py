"""The handles of a stream of frames, blocking and asyncio, and the state that both keep between calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self

from vlora.client import calls
from vlora.client.calls import Call, FrameImage
from vlora.client.values import FrameResult, FrameResults
from vlora.errors import DeadlineMissed, Disconnected, VLoraError

WAIT_S = 10.0  # how long the server holds a call that waits for room or for results

RETRY_S = 30.0  # the time that a server keeps a stream without a connection
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class UnreadResults:
    """Results received but not yet read. The next pull acknowledges those that were read."""

    def __init__(self) -> None:
        self._results: deque[FrameResult] = deque()
        self.last_read = -1
        self.finished = False

    def __bool__(self) -> bool:
        return bool(self._results)

    def add(self, part: FrameResults) -> None:
        self._results.extend(part.results)
        self.finished = part.finished

    def read(self) -> FrameResult:
        result = self._results.popleft()
        self.last_read = result.number
        return result


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


class SendTimeout:
    """Limits how long sending a frame may wait for room."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    def check(self, number: int) -> None:
        """Raises DeadlineMissed after the limit."""
        if time.monotonic() >= self._until:
            raise DeadlineMissed(
                f"frame {number} found no room within {self._timeout_s:g} s: read the stream's results while sending, "
                "or send fewer frames"
            )


class _Handle:
    """State of a stream that both handles share."""

    def __init__(self, stream_id: str, timeout_s: float) -> None:
        self.stream_id = stream_id
        self._timeout_s = timeout_s
        self._wait_s = min(WAIT_S, timeout_s / 2)
        self._num_sent = 0
        self._unread = UnreadResults()
        self._closed = False


class FrameStream(_Handle, Iterator[FrameResult]):
    """Sends frames and iterates over one result per frame, in the order of the frames. Created by
    `Client.open_stream`.

    One thread may send while another reads. A broken connection is re-established for up to 30 s without losing or
    repeating a result; then Disconnected is raised. UnknownStream: the server no longer has the stream.
    """

    def __init__(self, stream_id: str, ask: Callable[[Call[Any]], Any], timeout_s: float) -> None:
        super().__init__(stream_id, timeout_s)
        self._ask = ask
        self._sending = threading.Lock()
        self._reading = threading.Lock()

    def send(self, *images: FrameImage) -> int:
        """Send one frame, as many images as its head reads; returns its number, counted from 0.

        Blocks while there is no room: with drop "none" while the server is behind, and always while 256 results are
        unread. Raises DeadlineMissed if no room becomes free within the client's `timeout_s`, BadImage, TooLarge. A
        frame that cannot be decoded raises nothing here; its result contains the error.
        """
        frame = calls.read_frame(images)
        with self._sending:
            timeout = SendTimeout(self._timeout_s)
            while not self._retry(calls.send_frame(self.stream_id, self._num_sent, frame, self._wait_s)):
                timeout.check(self._num_sent)
            self._num_sent += 1
            return self._num_sent - 1

    def __next__(self) -> FrameResult:
        """Waits for the next result; stops after the last one once `end` was called, and when the stream is closed."""
        with self._reading:
            while not self._unread:
                if self._unread.finished or self._closed:
                    raise StopIteration
                pull = calls.pull_results(self.stream_id, self._unread.last_read, self._wait_s)
                try:
                    self._unread.add(self._retry(pull))
                except VLoraError:
                    if not self._closed:
                        raise
            return self._unread.read()

    def end(self) -> None:
        """Mark the end of the frames: iteration stops after the last frame's result."""
        self._retry(calls.end_frames(self.stream_id))

    def close(self) -> None:
        """Cancel unanswered frames and discard unread results."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(VLoraError):  # without a connection the server drops the stream itself
                self._ask(calls.close_frames(self.stream_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _retry(self, call: Call[Any]) -> Any:
        """Repeat a call until it succeeds: calls of a stream are idempotent on the server."""
        retry = ReconnectBackoff()
        while True:
            try:
                return self._ask(call)
            except Disconnected as error:
                if self._closed:
                    raise
                time.sleep(retry.pause_s(error))


class AsyncFrameStream(_Handle, AsyncIterator[FrameResult]):
    """As `FrameStream`, awaited. A cancelled send may still reach the server; reading can be cancelled."""

    def __init__(self, stream_id: str, ask: Callable[[Call[Any]], Awaitable[Any]], timeout_s: float) -> None:
        super().__init__(stream_id, timeout_s)
        self._ask = ask
        self._sending = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._sends: set[asyncio.Task[int]] = set()

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
