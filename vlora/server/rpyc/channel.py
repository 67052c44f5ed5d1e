"""RPyC's frames with limits on their size, their time, and the bytes of all messages in memory."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator
from struct import Struct
from typing import NoReturn

from rpyc.core import brine
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream

from vlora.server.security.connection_limits import PeerSocket
from vlora.server.security.message_budget import ByteBudget, ByteCharge

_SMALL_BYTES = 64 * 1024  # smaller messages are neither counted nor timed
FRAME_S = 120.0  # to receive a whole message
ROOM_S = 30.0  # a message waits this long in its socket for room
_MAX_UNAUTHENTICATED_BYTES = 64 * 1024  # a token fits, an image does not

MAX_VALUES = 65_536  # a request has its images and some tens of values
MAX_DEPTH = 32

_ALONE = frozenset(
    (
        *brine.IMM_INTS_LOADER,
        brine.TAG_NONE,
        brine.TAG_TRUE,
        brine.TAG_FALSE,
        brine.TAG_EMPTY_STR,
        brine.TAG_EMPTY_TUPLE,
        brine.TAG_NOT_IMPLEMENTED,
        brine.TAG_ELLIPSIS,
    )
)
_BYTES = {
    brine.TAG_STR1: 1,
    brine.TAG_STR2: 2,
    brine.TAG_STR3: 3,
    brine.TAG_STR4: 4,
    brine.TAG_FLOAT: brine.F8.size,
    brine.TAG_COMPLEX: brine.C16.size,
}
_COUNTED_BYTES = {
    brine.TAG_STR_L1: brine.I1,
    brine.TAG_INT_L1: brine.I1,
    brine.TAG_STR_L4: brine.I4,
    brine.TAG_INT_L4: brine.I4,
}
_VALUES = {
    brine.TAG_UNICODE: 1,
    brine.TAG_SLICE: 1,
    brine.TAG_FSET: 1,
    brine.TAG_TUP1: 1,
    brine.TAG_TUP2: 2,
    brine.TAG_TUP3: 3,
    brine.TAG_TUP4: 4,
}
_COUNTED_VALUES = {brine.TAG_TUP_L1: brine.I1, brine.TAG_TUP_L4: brine.I4}


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
        if compressed:
            data = self._inflate(data)
        if data:
            try:
                check_values(data, 1)  # after the message type byte
            except ValueError as error:
                self._refuse(str(error))
        return data

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
        """Close the connection."""
        self._channel.close()


# Checks a message's unpacked size before unpacking: one byte of RPyC's serialization can expand to a hundred.


def check_values(data: bytes, place: int) -> None:
    """Walk over the value at `place`. Raises ValueError for invalid data, too many values or too deep nesting.

    No value is created, so the cost depends on the number of values, not on the number of bytes.
    """
    left = [1]  # remaining values, by depth
    for _ in range(MAX_VALUES + 1):
        while left and not left[-1]:
            left.pop()
        if not left:
            return
        left[-1] -= 1
        tag = data[place : place + 1]
        place += 1
        if tag in _ALONE:
            continue
        if tag in _BYTES:
            place += _BYTES[tag]
        elif tag in _COUNTED_BYTES:
            head = _COUNTED_BYTES[tag]
            place += head.size + _unpack(head, data, place)
        elif tag in _VALUES:
            left.append(_VALUES[tag])
        elif tag in _COUNTED_VALUES:
            head = _COUNTED_VALUES[tag]
            left.append(_unpack(head, data, place))
            place += head.size
        else:
            raise ValueError("a message is invalid or truncated")
        if len(left) > MAX_DEPTH:
            raise ValueError(f"a message nests values over {MAX_DEPTH} deep")
    raise ValueError(f"a message has over {MAX_VALUES} values")


def _unpack(head: Struct, data: bytes, place: int) -> int:
    if place + head.size > len(data):
        raise ValueError("a message is invalid or truncated")
    count: int = head.unpack_from(data, place)[0]
    return count
