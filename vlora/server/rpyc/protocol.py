"""RPyC narrowed to values: what a peer may send, how much of it, and how answers go back without holding a thread.

RPyC as it comes lets a peer hand over references to its own objects, read attributes, inspect and pickle; none of that
is reachable here. A peer may fetch the service and call its `exposed_` methods with values; all else is refused.
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

_MAX_CALLS = 1024  # unanswered calls of one connection; its next ones wait in the socket
_MAX_PING = 4096
_MAX_REFUSAL = 200  # characters of an error that RPyC itself tells
_SEND_S = 30.0  # a peer that takes nothing for this long is disconnected
_LAST_REPLIES_S = 1.0
_HANDSHAKE_S = 10.0
_SMALL_BYTES = 64 * 1024  # messages up to here are neither counted nor timed
_FRAME_S = 120.0  # for a message to come in whole
_ROOM_S = 30.0  # how long a message waits in its socket for others to end
_MAX_STRANGERS = 64
_MAX_STRANGERS_BYTES = 64 * 1024  # a token fits, an image does not
_ACCEPT_PAUSE_S = 0.1  # after a refusal of the system's; descriptors come back when connections end

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
    """End the connection if the block takes longer: a socket's own timeout begins anew with every byte."""
    late = threading.Timer(seconds, caller.end)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


class BoundedChannel(Channel):
    """RPyC's frames up to a size, compressed or not; a longer one ends the connection before it is read."""

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
                check_values(data, 1)  # behind the byte that says what kind of message it is
            except ValueError as error:
                self._refuse(str(error))
        return data

    def take_charge(self) -> Callable[[], None]:
        """What the last message was counted with; to be called once its request has ended."""
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
        """Counted as the most it may become before more than a little of it is made: a few bytes can be millions."""
        most = self.max_bytes  # which rises when its sender shows a token meanwhile
        inflater = zlib.decompressobj()
        begin = inflater.decompress(data, min(_SMALL_BYTES, most))
        if inflater.eof:
            return begin
        self._count_in(max(0, most - self._charge))
        whole = begin + inflater.decompress(inflater.unconsumed_tail, most - len(begin) + 1)
        if len(whole) > most:
            self._refuse(f"a message that inflates to over this server's limit of {most} bytes")
        spare, self._charge = self._charge - len(whole), len(whole)
        self._held.give(spare)
        return whole

    def _count_in(self, num_bytes: int) -> None:
        if not self._held.take(num_bytes, _ROOM_S):
            self._refuse(f"there was no room for a message of {num_bytes} bytes")
        self._charge += num_bytes

    def _refuse(self, why: str) -> NoReturn:
        self.close()
        raise EOFError(why)


class Parts:
    """What a call is answered with little by little: replies with the text that came since the last one, then `end`.

    One thread puts, another takes: what comes while the peer does not read goes together, into the next reply.
    """

    end: Future[Any]
    """The last reply."""

    def __init__(self, reply: Callable[[str], Any]) -> None:
        """reply: the value that carries a text."""
        self._reply = reply
        self._texts: list[str] = []  # only ever appended to
        self._num_taken = 0
        self._told = False
        self._tell: Callable[[], None] | None = None

    def put(self, text: str) -> None:
        self._texts.append(text)
        self._announce()

    def tell(self, tell: Callable[[], None]) -> None:
        """tell: called when there is something to take, and not again before that was tried."""
        self._tell = tell
        if self._texts:
            self._announce()

    def take(self) -> Any | None:
        """A reply with all text that was not taken yet; None where there is none."""
        self._told = False  # before the texts are looked at: of what is put from here on is told again
        begin, self._num_taken = self._num_taken, len(self._texts)
        text = "".join(self._texts[begin : self._num_taken])
        return self._reply(text) if text else None

    def _announce(self) -> None:
        if self._tell is not None and not self._told:
            self._told = True
            self._tell()


class ValueConnection(rpyc.Connection):
    """One peer. Calls may answer with a Future: its reply is sent when it is there, in whatever order; or with Parts.

    Replies are written by a thread of their own, so that a peer that does not read holds up nobody but itself.
    """

    def __init__(self, root: Any, channel: Channel, config: dict[str, Any]) -> None:
        super().__init__(root, channel, config)
        self._exposed = tuple(name for name in dir(root) if name.startswith("exposed_"))
        self._unanswered = 0
        self._answered = threading.Condition()
        self._replies: queue.SimpleQueue[tuple[int, int, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="vlora-rpyc-writer", daemon=True).start()

    def wait_answered(self, timeout_s: float) -> None:
        """Wait until every call so far has its reply sent."""
        with self._answered:
            self._answered.wait_for(lambda: self._unanswered == 0, timeout_s)

    def _cleanup(self, _anyway: bool = True) -> None:
        self._replies.put(None)
        super()._cleanup(_anyway)

    # -- in: what a peer may ask --------------------------------------------------------------------------------------

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
        """The exposed methods of the service, and of nothing else."""
        return tuple((name, getattr(self._local_root, name).__doc__ or "") for name in self._exposed)

    def _handle_ping(self, data: Any) -> Any:
        # What comes back waits for its reader, and is counted nowhere.
        if not isinstance(data, bytes | str) or len(data) > _MAX_PING:
            raise ValueError(f"a ping carries bytes or text, {_MAX_PING} at most")
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
        """Answers are not awaited here; RPyC would make, and keep, a class for every name a peer thinks of."""
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

    # -- out ----------------------------------------------------------------------------------------------------------

    def _box_exc(self, kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        """Its kind and message. RPyC would add every attribute, such as where the service lies in memory."""
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
            except (OSError, EOFError, RuntimeError):  # the last from RPyC, whose cleanup may release its lock under us
                self._channel.close()
            if parts is None:
                with self._answered:
                    self._unanswered -= 1
                    self._answered.notify_all()


class RpycServer(ThreadedServer):
    """Accepts connections in a thread; each is read by a thread of its own. Raises BadConfig when it cannot listen.

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
        """Listen; every connection gets a service of its own, which is told who it is for. Messages count in `held`.

        Raises BadConfig where another server that started at the same time was first.
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
        """Whether new connections are taken."""
        return self._accepting is not None and self._accepting.is_alive()

    def close(self) -> None:
        """Stop. Replies that are ready, or become so within a moment, are still sent."""
        deadline = time.monotonic() + _LAST_REPLIES_S
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            connection.wait_answered(max(0.0, deadline - time.monotonic()))
        for sock in tuple(self.clients):
            shut_down(sock)  # before RPyC does it in its own way, which a writer under TLS would not survive
        super().close()

    def accept(self) -> None:
        """Take one connection. What fails here, for want of descriptors or threads, fails for that one only."""
        try:
            sock, address = self.listener.accept()
        except TimeoutError:
            return
        except OSError as error:
            if self.active:
                log.warning("no connection could be taken: %s", error)
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
            log.warning("a connection from %s was refused: there are too many", address[0])
        except (OSError, RuntimeError) as error:  # the latter when the system gives no more threads
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
    """A connection as its service sees it: one that nobody knows yet may send little."""

    def __init__(self, channel: BoundedChannel, caller: Caller, max_message_bytes: int) -> None:
        self._channel = channel
        self._caller = caller
        self._max_message_bytes = max_message_bytes

    @property
    def address(self) -> str:
        """Where it comes from; empty once it is gone."""
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
        """Keep the message of the call that is being made counted; to be called once its work has ended."""
        return self._channel.take_charge()

    def leave(self) -> None:
        """End the connection."""
        self._channel.close()
