"""Messages on a stream: the length in eight bytes, low byte first, then the message.

An event loop reads them with `MessageTransport`, a thread with `receive`, which has a deadline and takes descriptors
that a Unix socket carries. The engine's own thread has `EngineTransport` (`vlora.engine.ipc.messages`).
"""

from __future__ import annotations

import array
import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeVar, cast

import msgspec

T = TypeVar("T")

HEAD = struct.Struct("<Q")  # number of bytes that follow
_DESCRIPTOR = array.array("i").itemsize


class UnreadableMessage(Exception):
    """The other end has sent something else than messages."""


def pack(message: bytes) -> bytes:
    return HEAD.pack(len(message)) + message


class MessageTransport(asyncio.Protocol):
    """One end of a connection in an event loop. Created by `open`, or by a server of the loop.

    Attributes:
        max_bytes: A longer message closes the transport; None accepts any.
        num_bytes_received: Those of an incomplete message are counted as they arrive.
        closed: Done when no more messages will arrive; fails with what `on_message` raised.
    """

    def __init__(self, on_message: Callable[[bytes], object], max_bytes: int | None = None) -> None:
        self.on_message = on_message
        self.max_bytes = max_bytes
        self.num_bytes_received = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._part = bytearray()  # of an incomplete message
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, on_message: Callable[[bytes], object]) -> MessageTransport:
        """on_message: called with each message, in the iteration of the loop that receives it; may be replaced.

        The transport owns the socket from now on.
        """
        sock.setblocking(False)
        _, transport = await asyncio.get_running_loop().create_connection(lambda: cls(on_message), sock=sock)
        return transport

    def send(self, data: bytes) -> None:
        """Never blocks: data that the socket does not accept is buffered."""
        assert self._transport is not None
        self._transport.write(HEAD.pack(len(data)) + data)

    def extra(self, name: str) -> Any:
        """Information about the connection, as asyncio's `get_extra_info`."""
        assert self._transport is not None
        return self._transport.get_extra_info(name)

    def close_after_sending(self) -> None:
        """Close the socket once the peer has accepted the buffered data."""
        assert self._transport is not None
        self._transport.close()

    def close(self) -> None:
        """Close the socket; data that the peer has not received is lost."""
        assert self._transport is not None
        self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are of another class

    def data_received(self, data: bytes) -> None:
        self.num_bytes_received += len(data)
        self._part += data
        try:
            for message in self._complete_messages():
                self.on_message(message)
        except Exception as error:
            if not self.closed.done():
                self.closed.set_exception(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def _complete_messages(self) -> Iterator[bytes]:
        """Remove and return the complete messages in the buffer."""
        start = 0
        while len(self._part) >= start + HEAD.size:
            begin = start + HEAD.size
            size = HEAD.unpack_from(self._part, start)[0]
            if self.max_bytes is not None and size > self.max_bytes:
                raise UnreadableMessage(f"a message of {size} bytes, over the limit of {self.max_bytes}")
            end = begin + size
            if len(self._part) < end:
                break
            start = end
            yield bytes(self._part[begin:end])
        del self._part[:start]


# -- sockets of threads -----------------------------------------------------------------------------------------------


def send(sock: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """descriptors: duplicated in the receiving process; Unix sockets only."""
    data = pack(message)
    if descriptors:
        data = data[socket.send_fds(sock, [data], list(descriptors)) :]
    sock.sendall(data)


def receive(sock: socket.socket, max_bytes: int, deadline: float, descriptors: list[int] | None = None) -> bytes:
    """The next message.

    Args:
        deadline: Of `time.monotonic`.
        descriptors: Gets all that were sent with the message, which the caller closes.

    Raises:
        OSError: TimeoutError after the deadline, ConnectionError at the end and for a longer message.
    """
    head = bytearray()
    if descriptors is not None:
        _limit(sock, deadline)
        first, ancillary, _, _ = sock.recvmsg(HEAD.size, socket.CMSG_SPACE(_DESCRIPTOR))
        if not first:
            raise ConnectionError("the connection was closed")
        head += first
        for level, what, data in ancillary:
            if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", data[: len(data) - len(data) % _DESCRIPTOR])
    head += receive_exactly(sock, HEAD.size - len(head), deadline)
    if (size := HEAD.unpack(head)[0]) > max_bytes:
        raise ConnectionError(f"the peer sent a message of {size} bytes, over the limit of {max_bytes}")
    return bytes(receive_exactly(sock, size, deadline))


def receive_exactly(sock: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Exactly so many bytes. Raises OSError; TimeoutError after the deadline, if there is one."""
    data = bytearray(size)
    receive_into(sock, memoryview(data), deadline)
    return data


def receive_into(sock: socket.socket, left: memoryview, deadline: float | None = None) -> None:
    """As `receive_exactly`, into memory. Without a deadline the socket's own timeout applies to each read."""
    while left:
        if deadline is not None:
            _limit(sock, deadline)
        count = sock.recv_into(left)
        if not count:
            raise ConnectionError("the connection was closed")
        left = left[count:]


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the message did not arrive in time")
    sock.settimeout(left)


# -- values on pipes --------------------------------------------------------------------------------------------------


def pack_value(value: Any) -> bytes:
    return pack(msgspec.msgpack.encode(value))


def read_value(file: IO[bytes], kind: type[T]) -> T:
    """Raises EOFError at the end of the file."""
    (size,) = HEAD.unpack(_exactly(file, HEAD.size))
    return msgspec.msgpack.decode(_exactly(file, size), type=kind)


async def receive_value(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Raises asyncio.IncompleteReadError at the end, and msgspec.MsgspecError for another value."""
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data
