"""RPyC's protocol, restricted to calls of two methods with bytes, with asynchronous and streamed replies.

RPyC itself lets a peer pass references to its own objects, read attributes, inspect and pickle; none of that is here. A
peer may fetch the service and call `call` and `stream`; all else is refused.
"""

from __future__ import annotations

import contextlib
import functools
import io
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

from rpyc.core import brine, consts
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream

from vlora.client.values import PROTOCOL_VERSION, Reply, StreamPart, success
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


_MAX_CALLS = 1024  # unanswered calls of one connection; further calls wait in the socket
_MAX_PING = 4096
_MAX_REFUSAL = 200  # characters of an error message of this protocol
MAX_READS = 64  # to load one message; a call takes about 40
_SERVICE = ("vlora.Service", 1, 1)
"""RPyC's reference to the only object that a peer may call."""
_METHODS = {
    "exposed_call": "Perform a call -> its result.",
    "exposed_stream": "Perform a `Generate` -> StreamPart repeatedly, the last with the Answer.",
}

ReplyQueue = queue.SimpleQueue["tuple[int, int, Any] | None"]
"""(message type, number of the call, boxed value or StreamedReply) to write; None ends the writer."""


class StreamedReply:
    """A streamed answer to a call: replies with the text since the last reply, then `end`.

    One thread puts text, another takes it. Text that arrives while the peer does not read is joined in the next reply.
    """

    end: Future[Reply]
    """The last reply."""

    def __init__(self) -> None:
        self._texts: list[str] = []  # append-only
        self._num_taken = 0
        self._queued = False
        self._replies: ReplyQueue | None = None
        self._seq = 0

    def put(self, text: str) -> None:
        """Add text to the next reply."""
        self._texts.append(text)
        self._enqueue()

    def attach(self, replies: ReplyQueue, seq: int) -> None:
        """Add this reply to the queue whenever there is text to take, and not again before the next `take`.

        seq: the number of the call.
        """
        self._replies, self._seq = replies, seq
        if self._texts:
            self._enqueue()

    def take(self) -> Reply | None:
        """A reply with all text not taken yet; None without such text."""
        self._queued = False  # before reading the texts, so that later text is queued again
        begin, self._num_taken = self._num_taken, len(self._texts)
        text = "".join(self._texts[begin : self._num_taken])
        return success(StreamPart(text=text)) if text else None

    def _enqueue(self) -> None:
        if self._replies is not None and not self._queued:
            self._queued = True
            self._replies.put((consts.MSG_REPLY, self._seq, self))


class _Message(io.BytesIO):
    """A message from its type on. RPyC's loader reads each value at least once, so few reads bound its values."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.seek(1)
        self._left = MAX_READS

    def read(self, size: int | None = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise EOFError("a message has more values than a call")
        return super().read(size)


Perform = Callable[[bytes, StreamedReply | None], "Future[Reply]"]
"""Begins a call, of `stream` with the reply for its text. Replies are sent on completion, in any order."""


class ByteConnection:
    """One peer. A separate thread writes replies, so a peer that does not read blocks only itself."""

    def __init__(self, channel: BoundedChannel, peer: PeerSocket, max_message_bytes: int) -> None:
        self._channel = channel
        self._peer = peer
        self._max_message_bytes = max_message_bytes
        self._unanswered = 0
        self._answered = threading.Condition()
        self._replies: ReplyQueue = queue.SimpleQueue()
        threading.Thread(target=self._write, name="vlora-rpyc-writer", daemon=True).start()

    @property
    def address(self) -> str:
        """The peer's address; empty once it is disconnected."""
        try:
            return str(self._peer.sock.getpeername()[0])
        except OSError:
            return ""

    def set_authenticated(self, authenticated: bool) -> None:
        """A peer that is not may send only small messages, and is the first to be closed when there are too many."""
        self._peer.authenticated = authenticated
        most = self._max_message_bytes
        self._channel.max_bytes = most if authenticated else min(_MAX_UNAUTHENTICATED_BYTES, most)

    def take_charge(self) -> ByteCharge:
        """Take over the bytes of the current call's message. Release them once its work has ended."""
        return self._channel.take_charge()

    def wait_answered(self, timeout_s: float) -> None:
        """Wait until the replies to all calls so far are sent."""
        with self._answered:
            self._answered.wait_for(lambda: self._unanswered == 0, timeout_s)

    def close(self) -> None:
        self._channel.close()

    def serve(self, perform: Perform) -> None:
        """Read calls until the end of the connection."""
        try:
            while True:
                self._read(self._channel.recv(), perform)
        except EOFError:
            pass
        finally:
            self.close()
            self._replies.put(None)
            self.take_charge().release()

    # -- incoming requests --------------------------------------------------------------------------------------------

    def _read(self, data: bytes, perform: Perform) -> None:
        """Raises EOFError for a message that is no request: the server awaits no replies."""
        try:
            if data[0] != consts.MSG_REQUEST:
                raise ValueError("no request")
            seq, request = brine._load(_Message(data))  # noqa: SLF001
        except Exception as error:
            raise EOFError(f"an invalid message: {error}") from error
        with self._answered:
            self._answered.wait_for(lambda: self._unanswered < _MAX_CALLS or self._channel.closed)
            self._unanswered += 1
        try:
            handler, args = request
            result = self._handle(handler, perform, *_unbox(args))
        except EOFError:
            raise
        except Exception as error:
            # RPyC would add a traceback and every attribute, such as memory addresses.
            kind = type(error).__module__, type(error).__name__
            refusal = kind, (str(error)[:_MAX_REFUSAL],), (), "<traceback denied>"
            self._replies.put((consts.MSG_EXCEPTION, seq, refusal))
            return
        if isinstance(result, StreamedReply):
            result.attach(self._replies, seq)
            result = result.end
        if isinstance(result, Future):
            result.add_done_callback(functools.partial(self._on_completed, seq, self.take_charge()))
        else:
            self._replies.put((consts.MSG_REPLY, seq, result))

    def _handle(self, handler: Any, perform: Perform, *args: Any) -> Any:
        """The boxed reply to a request, or one that follows."""
        match handler:
            case consts.HANDLE_GETROOT:
                return consts.LABEL_REMOTE_REF, _SERVICE
            case consts.HANDLE_INSPECT:
                return consts.LABEL_VALUE, tuple(_METHODS.items())
            case consts.HANDLE_PING:
                (data,) = args
                # The echoed data waits for its reader and is not counted.
                if not isinstance(data, bytes | str) or len(data) > _MAX_PING:
                    raise ValueError(f"a ping carries bytes or text, at most {_MAX_PING}")
                return consts.LABEL_VALUE, data
            case consts.HANDLE_CLOSE:
                raise EOFError("the peer has closed the connection")
            case consts.HANDLE_DEL:
                return consts.LABEL_VALUE, None
            case consts.HANDLE_CALLATTR:
                return self._call(perform, *args)
        raise ValueError("only exposed methods can be called, by name; use vlora.client")

    def _call(self, perform: Perform, service: Any, name: Any, args: Any, kwargs: Any = ()) -> Any:
        if service is not _SERVICE:
            raise ValueError("only the service itself can be called")
        if name not in _METHODS or kwargs or not isinstance(args, tuple) or list(map(type, args)) != [bytes]:
            raise TypeError(
                f"this server uses protocol {PROTOCOL_VERSION}, of `call` and `stream` with bytes; install the same "
                "version of vlora on both sides"
            )
        if name == "exposed_call":
            return perform(args[0], None)
        reply = StreamedReply()
        reply.end = perform(args[0], reply)
        return reply

    # -- outgoing replies ---------------------------------------------------------------------------------------------

    def _on_completed(self, seq: int, charge: ByteCharge, outcome: Future[Reply]) -> None:
        charge.release()
        self._replies.put((consts.MSG_REPLY, seq, (consts.LABEL_VALUE, outcome.result())))

    def _write(self) -> None:
        while (reply := self._replies.get()) is not None:
            kind, seq, value = reply
            streamed = isinstance(value, StreamedReply)
            if isinstance(value, StreamedReply):
                if (part := value.take()) is None:
                    continue
                value = consts.LABEL_VALUE, part
            try:
                self._channel.send(brine.I1.pack(kind) + brine.dump((seq, value)))
            except (OSError, EOFError):
                self._channel.close()
            if not streamed:
                with self._answered:
                    self._unanswered -= 1
                    self._answered.notify_all()


def _unbox(package: Any) -> Any:
    """A value of a request. Raises ValueError for an object of the peer."""
    label, value = package
    if label == consts.LABEL_VALUE:
        return value
    if label == consts.LABEL_TUPLE:
        return tuple(_unbox(item) for item in value)
    if (label, value) == (consts.LABEL_LOCAL_REF, _SERVICE):
        return _SERVICE
    raise ValueError("only values can be sent, not objects")
