"""The blocking handle of a stream of frames."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from vlora.client import calls
from vlora.client.calls import Call, FrameImage
from vlora.client.stream_state import WAIT_S, ReconnectBackoff, SendTimeout, UnreadResults
from vlora.client.values import FrameResult
from vlora.errors import Disconnected, VLoraError


class FrameStream(Iterator[FrameResult]):
    """Sends frames and iterates over one result per frame, in the order of the frames. Created by
    `Client.open_stream`.

    One thread may send while another reads. A broken connection is re-established for up to 30 s without losing or
    repeating a result; then Disconnected is raised. UnknownStream: the server no longer has the stream.
    """

    def __init__(self, stream_id: str, ask: Callable[[Call[Any]], Any], timeout_s: float) -> None:
        self.stream_id = stream_id
        self._ask = ask
        self._timeout_s = timeout_s
        self._wait_s = min(WAIT_S, timeout_s / 2)
        self._num_sent = 0
        self._unread = UnreadResults()
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._closed = False

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
