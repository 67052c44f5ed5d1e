"""The open frame streams and their owners."""

from __future__ import annotations

import asyncio
import secrets
from typing import NamedTuple

from vlora.client.values import StreamOptions
from vlora.config import ServerConfig, Token
from vlora.errors import OverCapacity, UnknownStream
from vlora.server.metrics import Metrics
from vlora.server.streams.frame_questions import FrameExecutor
from vlora.server.streams.frame_stream import Preview, StreamSession

_ID_BYTES = 16


class WatchedStream(NamedTuple):
    """A stream as the console shows it. number: sequence number of the stream; the id is its owner's secret.

    owner: its token's name, which stays when the secret or the expiry date changes.
    """

    number: int
    stream: StreamSession
    owner: str | None
    preview: Preview


class StreamRegistry:
    """One per front end, used from its event loop. A stream outlives its last connection for a limited time."""

    def __init__(self, executor: FrameExecutor, config: ServerConfig, metrics: Metrics) -> None:
        """executor: answers the frames."""
        self._executor = executor
        self._metrics = metrics
        self._config = config
        self._open: dict[str, tuple[StreamSession, str | None]] = {}
        self._watched: dict[str, WatchedStream] = {}
        self._num_opened = 0
        self._users: dict[str, set[object]] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, options: StreamOptions, num_images: int | None, owner: Token | None, user: object) -> str:
        """Open a stream and return its id. user: the connection that keeps it open. Raises OverCapacity.

        num_images: images per frame; None for one or more.
        """
        if len(self._open) >= self._config.max_streams:
            raise OverCapacity(
                f"{len(self._open)} streams are open, which is this server's limit; close some, or try again later"
            )
        stream_id = secrets.token_urlsafe(_ID_BYTES)
        name = _name(owner)
        preview = Preview(self._config)
        stream = StreamSession(self._executor, options, num_images, self._metrics, preview, name)
        self._open[stream_id] = stream, name
        self._num_opened += 1
        self._watched[stream_id] = WatchedStream(self._num_opened, *self._open[stream_id], preview)
        self._metrics.streams(1)
        self._users[stream_id] = {user}
        return stream_id

    def use(self, stream_id: str, owner: Token | None, user: object) -> StreamSession:
        """The stream, which `user` keeps open from now on. Raises UnknownStream, also for another owner's stream."""
        stream, its_owner = self._open.get(stream_id, (None, None))
        if stream is None or its_owner != _name(owner):
            raise UnknownStream(
                f"no stream {stream_id[:32]!r} is open; a stream is closed {self._config.stream_keep_s:g} s after its "
                "connection breaks, and when the server stops; open a new one"
            )
        self._users[stream_id].add(user)
        if (expiry := self._expiries.pop(stream_id, None)) is not None:
            expiry.cancel()
        return stream

    def watched(self) -> tuple[WatchedStream, ...]:
        """Every open stream as the console shows it, the oldest first."""
        return tuple(self._watched.values())

    def resume(self) -> None:
        """Start the waiting frames: an engine is ready, or none will start."""
        for stream, _ in self._open.values():
            stream.resume()

    def leave(self, user: object) -> None:
        """The connection is closed: streams without another connection stay open for a limited time."""
        for stream_id, users in self._users.items():
            if user in users:
                users.discard(user)
                if not users:
                    self._expiries[stream_id] = asyncio.get_running_loop().call_later(
                        self._config.stream_keep_s, self.discard, stream_id
                    )

    def discard(self, stream_id: str) -> None:
        """Cancel the stream's frames and remove it."""
        stream, _ = self._open.pop(stream_id)
        self._metrics.streams(-1)
        del self._users[stream_id], self._watched[stream_id]
        if (expiry := self._expiries.pop(stream_id, None)) is not None:
            expiry.cancel()
        stream.cancel()

    def close(self) -> None:
        for stream_id in tuple(self._open):
            self.discard(stream_id)


def _name(owner: Token | None) -> str | None:
    return None if owner is None else owner.name
