"""RPyC restricted to calls with bytes, with asynchronous and streamed replies.

Default RPyC lets a peer pass references to its own objects, read attributes, inspect and pickle; none of that is
reachable here. A peer may fetch the service and call its `exposed_` methods; all else is refused.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import io
import queue
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

import rpyc
from rpyc.core import brine, consts
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream

from vlora.client.values import PROTOCOL_VERSION
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


@dataclasses.dataclass(eq=False)
class Peer:
    """A service's view of its connection. Before authentication the peer may send only small messages."""

    channel: BoundedChannel
    sock: PeerSocket
    max_message_bytes: int

    @property
    def address(self) -> str:
        """The peer's address; empty once it is disconnected."""
        try:
            return str(self.sock.sock.getpeername()[0])
        except OSError:
            return ""

    def restrict(self) -> None:
        """Accept only small messages, until the peer is authenticated."""
        self.channel.max_bytes = min(_MAX_UNAUTHENTICATED_BYTES, self.max_message_bytes)

    def set_authenticated(self) -> None:
        """Accept messages up to the server's limit, and keep the connection when others must be closed."""
        self.sock.authenticated = True
        self.channel.max_bytes = self.max_message_bytes

    def take_charge(self) -> ByteCharge:
        """Take over the bytes of the current call's message. Release them once its work has ended."""
        return self.channel.take_charge()

    def close(self) -> None:
        self.channel.close()


_MAX_CALLS = 1024  # unanswered calls of one connection; further calls wait in the socket
_MAX_PING = 4096
_MAX_REFUSAL = 200  # characters of an error message from RPyC itself
MAX_READS = 64  # to load one message; a call takes about 40

PROTOCOL_CONFIG = {
    "allow_public_attrs": False,
    "allow_safe_attrs": False,
    "allow_setattr": False,
    "allow_delattr": False,
    "allow_pickle": False,
    "import_custom_exceptions": False,
    "instantiate_custom_exceptions": False,
    "include_local_traceback": False,
    "include_local_version": False,
    "propagate_KeyboardInterrupt_locally": False,
    "sync_request_timeout": 1,
}
"""RPyC's settings for a connection."""

ReplyQueue = queue.SimpleQueue[tuple[int, int, Any] | None]
"""(message type, number of the call, boxed value or StreamedReply) to write; None ends the writer."""


class StreamedReply(abc.ABC):
    """A streamed answer to a call: replies with the text since the last reply, then `end`.

    One thread puts text, another takes it. Text that arrives while the peer does not read is joined in the next reply.
    """

    end: Future[Any]
    """The last reply."""

    def __init__(self) -> None:
        self._texts: list[str] = []  # append-only
        self._num_taken = 0
        self._queued = False
        self._replies: ReplyQueue | None = None
        self._seq = 0

    @abc.abstractmethod
    def encode(self, text: str) -> Any:
        """The value of a reply with this text."""

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

    def take(self) -> Any | None:
        """A reply with all text not taken yet; None without such text."""
        self._queued = False  # before reading the texts, so that later text is queued again
        begin, self._num_taken = self._num_taken, len(self._texts)
        text = "".join(self._texts[begin : self._num_taken])
        return self.encode(text) if text else None

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


class ByteConnection(rpyc.Connection):
    """One peer. A call may return a Future, with its reply sent on completion in any order, or a StreamedReply.

    A separate thread writes replies, so a peer that does not read blocks only itself.
    """

    def __init__(self, root: Any, channel: Channel, config: dict[str, Any]) -> None:
        super().__init__(root, channel, config)
        self._exposed = tuple(name for name in dir(root) if name.startswith("exposed_"))
        self._unanswered = 0
        self._answered = threading.Condition()
        self._replies: ReplyQueue = queue.SimpleQueue()
        threading.Thread(target=self._write, name="vlora-rpyc-writer", daemon=True).start()

    def wait_answered(self, timeout_s: float) -> None:
        """Wait until the replies to all calls so far are sent."""
        with self._answered:
            self._answered.wait_for(lambda: self._unanswered == 0, timeout_s)

    def _cleanup(self, _anyway: bool = True) -> None:
        self._replies.put(None)
        super()._cleanup(_anyway)

    # -- incoming requests --------------------------------------------------------------------------------------------

    @classmethod
    def _request_handlers(cls) -> dict[int, Any]:
        return {
            consts.HANDLE_PING: cls._handle_ping,
            consts.HANDLE_CLOSE: cls._handle_close,
            consts.HANDLE_GETROOT: cls._handle_getroot,
            consts.HANDLE_INSPECT: cls._handle_inspect,
            consts.HANDLE_DEL: cls._handle_del,
            consts.HANDLE_CALLATTR: cls._handle_callattr,
        }

    def _handle_inspect(self, id_pack: Any) -> tuple[tuple[str, str], ...]:
        """The exposed methods of the service only."""
        return tuple((name, getattr(self._local_root, name).__doc__ or "") for name in self._exposed)

    def _handle_ping(self, data: Any) -> Any:
        # The echoed data waits for its reader and is not counted.
        if not isinstance(data, bytes | str) or len(data) > _MAX_PING:
            raise ValueError(f"a ping carries bytes or text, at most {_MAX_PING}")
        return data

    def _handle_callattr(self, obj: Any, name: Any, args: Any, kwargs: Any = ()) -> Any:
        if obj is not self._local_root:
            raise ValueError("only the service itself can be called")
        if name not in self._exposed or kwargs or not isinstance(args, tuple) or list(map(type, args)) != [bytes]:
            raise TypeError(
                f"this server uses protocol {PROTOCOL_VERSION}, of `call` and `stream` with bytes; install the same "
                "version of vlora on both sides"
            )
        return getattr(obj, name)(*args)

    def _unbox(self, package: Any) -> Any:
        label, value = package
        if label == consts.LABEL_VALUE:
            return value
        if label == consts.LABEL_TUPLE:
            return tuple(self._unbox(item) for item in value)
        if label == consts.LABEL_LOCAL_REF:
            return self._local_objects[value]
        raise ValueError("only values can be sent, not objects")

    def _dispatch(self, data: bytes) -> None:
        """Only requests: the server awaits no replies."""
        self._recvlock.release()
        try:
            if data[0] != consts.MSG_REQUEST:
                raise ValueError("no request")
            seq, args = brine._load(_Message(data))  # noqa: SLF001
        except Exception as error:
            self._channel.close()
            raise EOFError(f"an invalid message: {error}") from error
        self._dispatch_request(seq, args)

    def _dispatch_request(self, seq: int, raw_args: Any) -> None:
        with self._answered:
            self._answered.wait_for(lambda: self._unanswered < _MAX_CALLS or self._channel.closed)
            self._unanswered += 1
        try:
            handler, args = raw_args
            if handler not in self._HANDLERS:
                raise ValueError("only exposed methods can be called, by name; use vlora.client")
            result = self._HANDLERS[handler](self, *self._unbox(args))
        except Exception as error:
            self._replies.put((consts.MSG_EXCEPTION, seq, self._box_exc(type(error), error, None)))
            return
        if isinstance(result, StreamedReply):
            result.attach(self._replies, seq)
            self._reply_on_completion(result.end, seq)
        elif isinstance(result, Future):
            self._reply_on_completion(result, seq)
        else:
            self._replies.put((consts.MSG_REPLY, seq, self._box(result)))

    # -- outgoing replies ---------------------------------------------------------------------------------------------

    def _box_exc(self, kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        """The error's type and message. RPyC would add every attribute, such as the service's memory address."""
        return (kind.__module__, kind.__name__), (str(error)[:_MAX_REFUSAL],), (), "<traceback denied>"

    def _reply_on_completion(self, outcome: Future[Any], seq: int) -> None:
        outcome.add_done_callback(functools.partial(self._on_completed, seq, self._channel.take_charge()))

    def _on_completed(self, seq: int, charge: ByteCharge, outcome: Future[Any]) -> None:
        charge.release()
        self._replies.put((consts.MSG_REPLY, seq, self._box(outcome.result())))

    def _write(self) -> None:
        while (reply := self._replies.get()) is not None:
            kind, seq, value = reply
            streamed = isinstance(value, StreamedReply)
            if isinstance(value, StreamedReply):
                if (part := value.take()) is None:
                    continue
                value = self._box(part)
            try:
                self._send(kind, seq, value)
            except (OSError, EOFError, RuntimeError):  # RuntimeError: RPyC's cleanup may release its lock
                self._channel.close()
            if not streamed:
                with self._answered:
                    self._unanswered -= 1
                    self._answered.notify_all()
