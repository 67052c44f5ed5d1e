"""The open frame streams and their owners."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets

from vlora.client.values import StreamOptions
from vlora.config import ServerConfig, Token
from vlora.errors import OverCapacity, UnknownStream
from vlora.server.images import RawImage
from vlora.server.metrics import Metrics
from vlora.server.security.access import name_of
from vlora.server.streams.frame_questions import FrameExecutor
from vlora.server.streams.frame_stream import Preview, StreamSession

_ID_BYTES = 16
_LOOK_S = 0.1  # between two looks for a stream that is not open yet


@dataclasses.dataclass
class OpenStream:
    """A stream, its number for the console (the id is its owner's secret), and the connections that keep it open.

    owner: its token's name, which stays when the secret or the expiry date changes. expiry: set without connections.
    """

    number: int
    stream: StreamSession
    owner: str | None
    preview: Preview
    users: set[object]
    expiry: asyncio.TimerHandle | None = None


class StreamRegistry:
    """One per front end, used from its event loop. A stream outlives its last connection for a limited time."""

    def __init__(self, executor: FrameExecutor, config: ServerConfig, metrics: Metrics) -> None:
        self._executor = executor
        self._metrics = metrics
        self._config = config
        self._open: dict[str, OpenStream] = {}
        self._num_opened = 0

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
        num_own = sum(known.owner == name_of(owner) for known in self._open.values())
        if owner is not None and owner.cameras is not None and num_own >= owner.cameras:
            raise OverCapacity(f"{owner.name!r} has {num_own} streams open, its quota of cameras; close one of them")
        stream_id = secrets.token_urlsafe(_ID_BYTES)
        name, preview = name_of(owner), Preview(self._config)
        stream = StreamSession(self._executor, options, num_images, self._metrics, preview, name)
        self._num_opened += 1
        self._open[stream_id] = OpenStream(self._num_opened, stream, name, preview, {user})
        self._metrics.streams.inc()
        return stream_id

    def use(self, stream_id: str, owner: Token | None, user: object) -> StreamSession:
        """The stream, which `user` keeps open from now on. Raises UnknownStream, also for another owner's stream."""
        known = self._open.get(stream_id)
        if known is None or known.owner != name_of(owner):
            raise UnknownStream(
                f"no stream {stream_id[:32]!r} is open; a stream is closed {self._config.stream_keep_s:g} s after its "
                "connection breaks, and when the server stops; open a new one"
            )
        known.users.add(user)
        _stay(known)
        return known.stream

    async def next_image(self, owner: str, name: str, wait_s: float) -> bytes | RawImage | None:
        """The last image of the next frame of a stream, of several with this name the fastest; None without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    known = [each for each in self._open.values() if each.owner == owner]
                    found = [each.stream for each in known if each.stream.options.name == name]
                    if found:
                        image = await max(found, key=lambda each: each.options.fps or math.inf).next_image()
                        if image is not None:
                            return image
                    await asyncio.sleep(_LOOK_S)
        return None

    def watched(self) -> tuple[OpenStream, ...]:
        """Every open stream as the console shows it, the oldest first."""
        return tuple(self._open.values())

    def resume(self) -> None:
        """Start the waiting frames: an engine is ready, or none will start."""
        for known in self._open.values():
            known.stream.resume()

    def leave(self, user: object) -> None:
        """The connection is closed: streams without another connection stay open for a limited time."""
        for stream_id, known in self._open.items():
            if user in known.users:
                known.users.discard(user)
                if not known.users:
                    known.expiry = asyncio.get_running_loop().call_later(
                        self._config.stream_keep_s, self.discard, stream_id
                    )

    def discard(self, stream_id: str) -> None:
        known = self._open.pop(stream_id)
        self._metrics.streams.dec()
        _stay(known)
        known.stream.cancel()

    def close(self) -> None:
        for stream_id in tuple(self._open):
            self.discard(stream_id)


def _stay(known: OpenStream) -> None:
    if known.expiry is not None:
        known.expiry.cancel()
        known.expiry = None
