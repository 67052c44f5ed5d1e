"""RPyC's frames with limits on their size, their time, and the bytes of all messages in memory."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator
from typing import NoReturn

from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream

from vlora.server.security.limits import ByteBudget, ByteCharge, PeerSocket

_SMALL_BYTES = 64 * 1024  # smaller messages are neither counted nor timed
FRAME_S = 120.0  # to receive a whole message
ROOM_S = 30.0  # a message waits this long in its socket for room
_MAX_UNAUTHENTICATED_BYTES = 64 * 1024  # a token fits, an image does not


@contextlib.contextmanager
def end_after(seconds: float, peer: PeerSocket) -> Iterator[None]:
    """End the connection if the block takes longer. A socket's own timeout restarts with every byte."""
    timer = threading.Timer(seconds, peer.end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class BoundedChannel(Channel):
    """Reads RPyC's frames, compressed or not, up to a size limit; a longer frame ends the connection unread."""

    def __init__(self, stream: SocketStream, max_bytes: int, budget: ByteBudget, peer: PeerSocket) -> None:
        super().__init__(stream, compress=False)
        self._peer = peer
        self.max_bytes = max_bytes
        self._charge = ByteCharge(budget)

    def recv(self) -> bytes:
        self._charge.release()
        length, compressed = self.FRAME_HEADER.unpack(self.stream.read(self.FRAME_HEADER.size))
        if length > self.max_bytes:
            self._refuse(f"a message of {length} bytes, over this server's limit of {self.max_bytes}")
        data = self._read(length)
        return self._inflate(data) if compressed else data

    def take_charge(self) -> ByteCharge:
        """Take over the bytes of the last message; without this they are released with the next message."""
        return self._charge.move()

    def _read(self, length: int) -> bytes:
        size = length + len(self.FLUSHER)
        if length <= _SMALL_BYTES:
            return self.stream.read(size)[: -len(self.FLUSHER)]
        self._reserve(length)
        try:
            with end_after(FRAME_S, self._peer):
                return self.stream.read(size)[: -len(self.FLUSHER)]
        except BaseException:
            self._charge.release()
            raise

    def _inflate(self, data: bytes) -> bytes:
        """Inflate a message. Its maximum size is charged first, because a few bytes can inflate to millions."""
        limit = self.max_bytes  # increases when the peer authenticates meanwhile
        inflater = zlib.decompressobj()
        begin = inflater.decompress(data, min(_SMALL_BYTES, limit))
        if inflater.eof:
            return begin
        self._reserve(max(0, limit - self._charge.num_bytes))
        whole = begin + inflater.decompress(inflater.unconsumed_tail, limit - len(begin) + 1)
        if len(whole) > limit:
            self._refuse(f"a message inflates to over this server's limit of {limit} bytes")
        self._charge.shrink_to(len(whole))
        return whole

    def _reserve(self, num_bytes: int) -> None:
        if not self._charge.add(num_bytes, ROOM_S):
            self._refuse(f"no room for a message of {num_bytes} bytes")

    def _refuse(self, why: str) -> NoReturn:
        self.close()
        raise EOFError(why)


class Peer:
    """A service's view of its connection. Before authentication the peer may send only small messages."""

    def __init__(self, channel: BoundedChannel, sock: PeerSocket, max_message_bytes: int) -> None:
        self._channel = channel
        self._sock = sock
        self._max_message_bytes = max_message_bytes

    @property
    def address(self) -> str:
        """The peer's address; empty once it is disconnected."""
        try:
            return str(self._sock.sock.getpeername()[0])
        except OSError:
            return ""

    def restrict(self) -> None:
        """Accept only small messages, until the peer is authenticated."""
        self._channel.max_bytes = min(_MAX_UNAUTHENTICATED_BYTES, self._max_message_bytes)

    def set_authenticated(self) -> None:
        """Accept messages up to the server's limit, and keep the connection when others must be closed."""
        self._sock.authenticated = True
        self._channel.max_bytes = self._max_message_bytes

    def take_charge(self) -> ByteCharge:
        """Take over the bytes of the current call's message. Release them once its work has ended."""
        return self._channel.take_charge()

    def close(self) -> None:
        self._channel.close()
