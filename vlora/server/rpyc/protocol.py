"""RPyC restricted to plain values, with message size limits and asynchronous replies.

Default RPyC lets a peer pass references to its own objects, read attributes, inspect and pickle; none of that is
reachable here. A peer may fetch the service and call its `exposed_` methods with values; all else is refused.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

import rpyc
from rpyc.core import consts
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream
from rpyc.utils.server import ThreadedServer

from vlora.client.plain import PlainStream
from vlora.client.silence import notice_silence
from vlora.client.tls import TlsStream, shut_down
from vlora.errors import BadConfig
from vlora.server.rpyc.unpacked_size import check_values
from vlora.server.security.connection_limits import Caller, Callers, connection_share
from vlora.server.security.message_budget import ByteBudget

log = logging.getLogger(__name__)

_MAX_CALLS = 1024  # unanswered calls of one connection; further calls wait in the socket
_MAX_PING = 4096
_MAX_REFUSAL = 200  # characters of an error message from RPyC itself
_SEND_S = 30.0  # a peer that reads nothing for this long is disconnected
_LAST_REPLIES_S = 1.0
_HANDSHAKE_S = 10.0
_SMALL_BYTES = 64 * 1024  # smaller messages are neither counted nor timed
_FRAME_S = 120.0  # to receive a whole message
_ROOM_S = 30.0  # a message waits this long in its socket for room
_MAX_STRANGERS = 64
_MAX_STRANGERS_BYTES = 64 * 1024  # a token fits, an image does not
_ACCEPT_PAUSE_S = 0.1  # after the system refuses a connection; descriptors are freed when connections end

_PROTOCOL = {
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


@contextlib.contextmanager
def _deadline(seconds: float, caller: Caller) -> Iterator[None]:
    """End the connection if the block takes longer. A socket's own timeout restarts with every byte."""
    late = threading.Timer(seconds, caller.end)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


class BoundedChannel(Channel):
    """Reads RPyC's frames, compressed or not, up to a size limit; a longer frame ends the connection unread."""

    def __init__(self, stream: SocketStream, max_bytes: int, held: ByteBudget, caller: Caller) -> None:
        super().__init__(stream, compress=False)
        self._caller = caller
        self.max_bytes = max_bytes
        self._held = held
        self._charge = 0

    def recv(self) -> bytes:
        self.take_charge()()
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

    def take_charge(self) -> Callable[[], None]:
        """Take over the last message's charge. Call the result once its request has ended, to release it."""
        charge, self._charge = self._charge, 0
        return lambda: self._held.give(charge)

    def _read(self, length: int) -> bytes:
        size = length + len(self.FLUSHER)
        if length <= _SMALL_BYTES:
            return self.stream.read(size)[: -len(self.FLUSHER)]
        self._count_in(length)
        try:
            with _deadline(_FRAME_S, self._caller):
                return self.stream.read(size)[: -len(self.FLUSHER)]
        except BaseException:
            self.take_charge()()
            raise

    def _inflate(self, data: bytes) -> bytes:
        """Inflate a message. Its maximum size is charged first, because a few bytes can inflate to millions."""
        most = self.max_bytes  # increases when the peer authenticates meanwhile
        inflater = zlib.decompressobj()
        begin = inflater.decompress(data, min(_SMALL_BYTES, most))
        if inflater.eof:
            return begin
        self._count_in(max(0, most - self._charge))
        whole = begin + inflater.decompress(inflater.unconsumed_tail, most - len(begin) + 1)
        if len(whole) > most:
            self._refuse(f"a message inflates to over this server's limit of {most} bytes")
        spare, self._charge = self._charge - len(whole), len(whole)
        self._held.give(spare)
        return whole

    def _count_in(self, num_bytes: int) -> None:
        if not self._held.take(num_bytes, _ROOM_S):
            self._refuse(f"no room for a message of {num_bytes} bytes")
        self._charge += num_bytes

    def _refuse(self, why: str) -> NoReturn:
        self.close()
        raise EOFError(why)


class Parts:
    """A streamed answer to a call: replies with the text since the last reply, then `end`.

    One thread puts, another takes. Text that arrives while the peer does not read is joined in the next reply.
    """

    end: Future[Any]
    """The last reply."""

    def __init__(self, reply: Callable[[str], Any]) -> None:
        """reply: builds the reply value for a text."""
        self._reply = reply
        self._texts: list[str] = []  # append-only
        self._num_taken = 0
        self._told = False
        self._tell: Callable[[], None] | None = None

    def put(self, text: str) -> None:
        self._texts.append(text)
        self._announce()

    def tell(self, tell: Callable[[], None]) -> None:
        """Set the callback that is called when there is text to take, and not again before the next `take`."""
        self._tell = tell
        if self._texts:
            self._announce()

    def take(self) -> Any | None:
        """A reply with all text not taken yet; None without such text."""
        self._told = False  # before reading the texts, so that later text causes a new call
        begin, self._num_taken = self._num_taken, len(self._texts)
        text = "".join(self._texts[begin : self._num_taken])
        return self._reply(text) if text else None

    def _announce(self) -> None:
        if self._tell is not None and not self._told:
            self._told = True
            self._tell()


class ValueConnection(rpyc.Connection):
    """One peer. A call may return a Future, with its reply sent on completion in any order, or Parts.

    A separate thread writes replies, so a peer that does not read blocks only itself.
    """

    def __init__(self, root: Any, channel: Channel, config: dict[str, Any]) -> None:
        super().__init__(root, channel, config)
        self._exposed = tuple(name for name in dir(root) if name.startswith("exposed_"))
        self._unanswered = 0
        self._answered = threading.Condition()
        self._replies: queue.SimpleQueue[tuple[int, int, Any] | None] = queue.SimpleQueue()
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
        if kwargs:
            raise TypeError("arguments are passed by position")
        if name not in self._exposed:
            raise AttributeError("the service exposes no method of that name")
        return getattr(obj, name)(*args)

    def _unbox(self, package: Any) -> Any:
        label, value = package
        if label == consts.LABEL_VALUE:
            return value
        if label == consts.LABEL_TUPLE:
            return tuple(self._unbox(item) for item in value)
        if label == consts.LABEL_LOCAL_REF:
            return self._local_objects[value]
        raise ValueError("only values can be sent: bytes, text, numbers and tuples of them")

    def _unbox_exc(self, raw: Any) -> Exception:
        """The server awaits no replies. RPyC would create and keep a class for every name that a peer sends."""
        return ValueError("an exception of the peer")

    def _dispatch_request(self, seq: int, raw_args: Any) -> None:
        with self._answered:
            self._answered.wait_for(lambda: self._unanswered < _MAX_CALLS or self._channel.closed)
            self._unanswered += 1
        try:
            handler, args = raw_args
            if handler not in self._HANDLERS:
                raise ValueError("only exposed methods can be called, by name and with values; use vlora.client")
            result = self._HANDLERS[handler](self, *self._unbox(args))
        except Exception as error:
            self._replies.put((consts.MSG_EXCEPTION, seq, self._box_exc(type(error), error, None)))
            return
        if isinstance(result, Parts):
            result.tell(lambda: self._replies.put((consts.MSG_REPLY, seq, result)))
            self._reply_with(result.end, seq)
        elif isinstance(result, Future):
            self._reply_with(result, seq)
        else:
            self._replies.put((consts.MSG_REPLY, seq, self._box(result)))

    # -- outgoing replies ---------------------------------------------------------------------------------------------

    def _box_exc(self, kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        """The error's type and message. RPyC would add every attribute, such as the service's memory address."""
        return (kind.__module__, kind.__name__), (str(error)[:_MAX_REFUSAL],), (), "<traceback denied>"

    def _reply_with(self, outcome: Future[Any], seq: int) -> None:
        give_back = self._channel.take_charge()
        outcome.add_done_callback(lambda _: give_back())
        outcome.add_done_callback(lambda done: self._replies.put((consts.MSG_REPLY, seq, self._box(done.result()))))

    def _write(self) -> None:
        while (reply := self._replies.get()) is not None:
            kind, seq, value = reply
            parts = value if isinstance(value, Parts) else None
            if parts is not None:
                if (part := parts.take()) is None:
                    continue
                value = self._box(part)
            try:
                self._send(kind, seq, value)
            except (OSError, EOFError, RuntimeError):  # RuntimeError: RPyC's cleanup may release its lock
                self._channel.close()
            if parts is None:
                with self._answered:
                    self._unanswered -= 1
                    self._answered.notify_all()


class RpycServer(ThreadedServer):
    """Accepts connections in a thread and reads each in its own thread. Raises BadConfig when it cannot listen.

    tls: None for plain connections.
    """

    def __init__(self, host: str, port: int, max_message_bytes: int, tls: ssl.SSLContext | None = None) -> None:
        self._address = f"{host}:{port}"
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._connections: set[ValueConnection] = set()
        self._lock = threading.Lock()
        self._callers = Callers(connection_share(), _MAX_STRANGERS)
        self._accepting: threading.Thread | None = None
        try:
            super().__init__(
                rpyc.VoidService,
                hostname=host,
                ipv6=":" in host,
                port=port,
                protocol_config=dict(_PROTOCOL),
                logger=log,
            )
        except OSError as error:
            raise self._taken(error) from error

    def start_in_thread(self, make_service: Callable[[Peer], rpyc.Service], held: ByteBudget) -> None:
        """Listen. Every connection gets its own service, created with its peer. Messages count in `held`.

        Raises BadConfig when another server has taken the address since.
        """
        self._held = held
        self._make_service = make_service
        try:
            self._listen()
        except OSError as error:
            raise self._taken(error) from error
        self._accepting = threading.Thread(target=self.start, name="vlora-rpyc-accept", daemon=True)
        self._accepting.start()

    @property
    def listening(self) -> bool:
        """Whether new connections are accepted."""
        return self._accepting is not None and self._accepting.is_alive()

    def close(self) -> None:
        """Stop. Replies that are ready, or become ready shortly after, are still sent."""
        deadline = time.monotonic() + _LAST_REPLIES_S
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            connection.wait_answered(max(0.0, deadline - time.monotonic()))
        for sock in tuple(self.clients):
            shut_down(sock)  # before RPyC does it in a way that breaks a TLS writer
        super().close()

    def accept(self) -> None:
        """Accept one connection. A lack of descriptors or threads fails this connection only."""
        try:
            sock, address = self.listener.accept()
        except TimeoutError:
            return
        except OSError as error:
            if self.active:
                log.warning("cannot accept a connection: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)
            return
        caller = Caller(sock)
        self.clients.add(sock)
        try:
            sock.setblocking(True)
            if self._callers.admit(caller):
                threading.Thread(
                    target=self._serve, args=(caller, address[0]), name="vlora-rpyc-reader", daemon=True
                ).start()
                return
            log.warning("a connection from %s was refused: too many connections", address[0])
        except (OSError, RuntimeError) as error:  # RuntimeError: the system has no more threads
            log.warning("a connection from %s was closed: %s", address[0], error)
        self._forget(caller)

    def _taken(self, error: OSError) -> BadConfig:
        return BadConfig(f"cannot listen on {self._address}: {error.strerror}; choose another --rpyc-port")

    def _serve(self, caller: Caller, address: str) -> None:
        try:
            sock = caller.sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_silence(sock)
            if self._tls is not None:
                self.clients.discard(sock)
                caller.sock = sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                self.clients.add(sock)
                with _deadline(_HANDSHAKE_S, caller):
                    sock.do_handshake()
            sock.settimeout(_SEND_S)
            stream = TlsStream(sock, _SEND_S) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
            channel = BoundedChannel(stream, self._max_message_bytes, self._held, caller)
            service = self._make_service(Peer(channel, caller, self._max_message_bytes))
            connection = ValueConnection(service, channel, self.protocol_config)
            with self._lock:
                self._connections.add(connection)
            try:
                connection.serve_all()
            finally:
                channel.take_charge()()
                with self._lock:
                    self._connections.discard(connection)
        except Exception as error:
            log.warning("a connection from %s was closed: %s: %s", address, type(error).__name__, error)
        finally:
            self._forget(caller)

    def _forget(self, caller: Caller) -> None:
        self._callers.leave(caller)
        self.clients.discard(caller.sock)
        caller.sock.close()


class Peer:
    """A service's view of its connection. Before authentication the peer may send only small messages."""

    def __init__(self, channel: BoundedChannel, caller: Caller, max_message_bytes: int) -> None:
        self._channel = channel
        self._caller = caller
        self._max_message_bytes = max_message_bytes

    @property
    def address(self) -> str:
        """The peer's address; empty once it is disconnected."""
        try:
            return str(self._caller.sock.getpeername()[0])
        except OSError:
            return ""

    def distrust(self) -> None:
        self._channel.max_bytes = min(_MAX_STRANGERS_BYTES, self._max_message_bytes)

    def trust(self) -> None:
        self._caller.known = True
        self._channel.max_bytes = self._max_message_bytes

    def take_charge(self) -> Callable[[], None]:
        """Take over the charge of the current call's message. Call the result once its work has ended."""
        return self._channel.take_charge()

    def leave(self) -> None:
        """End the connection."""
        self._channel.close()
