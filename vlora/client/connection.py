"""One RPyC connection, shared by any number of threads: callers send calls, a reader thread sets their futures."""

from __future__ import annotations

import contextlib
import itertools
import ssl
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import rpyc
from rpyc.core import consts
from rpyc.core.channel import Channel

from vlora.client.requests import Authenticate, Cancel, CancellableCall
from vlora.client.sockets import PlainStream, TlsStream, enable_keepalive, shut_down
from vlora.client.values import PROTOCOL_VERSION, Hello, StreamPart, open_reply
from vlora.errors import BadConfig, BadRequest, DeadlineMissed, Disconnected, TooLarge, VLoraError
from vlora.operations import Operation

C = TypeVar("C", bound=Operation)

_encode = msgspec.msgpack.Encoder().encode

_CONNECT_S = 5.0
_SEND_S = 60.0  # a server that reads nothing for this long counts as disconnected


def addresses_of(texts: Iterable[str], name: str) -> list[tuple[str, int]]:
    """Host and port of each HOST:PORT. name: for the error. Raises BadConfig."""
    found = []
    for text in texts:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BadConfig(f"{name} is {text!r}; write HOST:PORT, with a port from 1 to 65535")
        found.append((host.strip("[]"), int(port)))
    return found


class ServerConnection:
    """A connection to the server. Raises Disconnected if the server cannot be reached, BadRequest if it uses another
    protocol version, Unauthorized if it rejects the token.
    """

    def __init__(self, host: str, port: int, token: str | None, tls: ssl.SSLContext | None) -> None:
        self._address = f"{host}:{port}"
        self._max_message_bytes = 0  # of any size until the server has told
        self._pending: set[Future[Any]] = set()
        self._lock = threading.RLock()  # a stream may be collected while it is held
        self._call_ids = itertools.count(1)
        try:
            self._stream = _open_stream(host, port, tls)
        except (OSError, EOFError, ValueError) as error:  # ValueError: an invalid host
            raise self._unreachable(error, tls) from error
        try:
            # Images are already compressed, so the channel does not compress them.
            channel = Channel(self._stream, compress=False)
            self._rpyc = _CallingConnection(rpyc.VoidService(), channel, {"sync_request_timeout": _CONNECT_S})
            self._root = self._rpyc.root
        except Exception as error:  # the peer may be any program and send anything
            self._stream.close()
            raise self._unreachable(error, tls) from error
        self._reader = threading.Thread(target=self._read, name="vlora-client-reader", daemon=True)
        self._reader.start()
        try:
            hello: Hello = self.start(Authenticate(token)).result(_CONNECT_S)
        except (TimeoutError, VLoraError) as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise DeadlineMissed(f"no answer from {self._address} within {_CONNECT_S:g} s") from error
            raise
        if hello.protocol != PROTOCOL_VERSION:
            self.close()
            raise BadRequest(
                f"the server at {self._address} uses protocol {hello.protocol}, this client {PROTOCOL_VERSION}; "
                "install the same version of vlora on both sides"
            )
        self._max_message_bytes = hello.max_message_bytes

    @property
    def closed(self) -> bool:
        return not self._reader.is_alive()

    def numbered(self, call: C) -> C:
        """The call with its trace and a number that is unique on this connection, if it can be cancelled by it."""
        if isinstance(call, CancellableCall):
            carrier: dict[str, str] = {}
            if "opentelemetry.trace" in sys.modules:
                from opentelemetry import propagate

                propagate.inject(carrier)
            own = {"call_id": next(self._call_ids), "traceparent": carrier.get("traceparent", "")}
            return msgspec.structs.replace(call, **own)
        return call

    def start(self, call: Operation, on_value: Callable[[StreamPart], bool] | None = None) -> Future[Any]:
        """Send a call; its future receives the value or the typed error. Does not wait for the answer.

        on_value: for a streamed answer: called with each part in the reader's thread; returns whether more follow. The
        future receives the last one.
        """
        try:
            data = _encode(call)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise BadRequest(f"the request cannot be sent: {error}") from error
        if len(data) > (limit := self._max_message_bytes or len(data)):
            raise TooLarge(f"the request has {len(data)} bytes; this server takes at most {limit}")
        future: Future[Any] = Future()
        with self._lock:
            if self.closed:
                raise self._disconnected()
            self._pending.add(future)
        future.add_done_callback(self._settle)  # before any reply can arrive
        try:
            kind = StreamPart if on_value is not None else call.result
            self._rpyc.start_call(self._root, data, kind, future, on_value)
        except (OSError, EOFError, RuntimeError) as error:  # RuntimeError: RPyC's cleanup has released its lock
            self._settle(future)
            raise self._disconnected() from error
        return future

    def abandon(self, call: Operation) -> None:
        """Cancel an abandoned request on the server; without a connection the server cancels it itself."""
        if isinstance(call, CancellableCall):
            with contextlib.suppress(VLoraError):
                self.start(Cancel(call.call_id))

    def close(self) -> None:
        """Close the connection; the server cancels the connection's running calls."""
        # Shut down only: the reader, which may be waiting on the socket, closes it.
        shut_down(self._stream.sock)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                self._rpyc.serve(None)
        except Exception:  # any malformed input ends the connection
            shut_down(self._stream.sock)
        finally:
            with self._lock:
                lost, self._pending = self._pending, set()
            for future in lost:
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._disconnected())

    def _settle(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _unreachable(self, error: Exception, tls: ssl.SSLContext | None) -> Disconnected:
        cause = error.args[0] if isinstance(error, EOFError) and error.args else error
        remedy = "start one with `vlora serve`, or give another address"
        if isinstance(cause, ssl.SSLCertVerificationError):
            remedy = "give the CA of its certificate (tls=, --tls-ca), and a host that the certificate names"
        elif isinstance(cause, ssl.SSLError):
            remedy = "it may not use TLS, or it may require a client certificate (tls=, --tls-cert and --tls-key)"
        elif tls is None and isinstance(cause, ConnectionResetError | BrokenPipeError | str):
            remedy = "it may be another kind of server, or require TLS (tls=, --tls-ca)"
        return Disconnected(f"cannot reach a server at {self._address}: {cause}; {remedy}")

    def _disconnected(self) -> Disconnected:
        return Disconnected(f"the connection to {self._address} is gone; is the server still running?")


def _open_stream(host: str, port: int, tls: ssl.SSLContext | None) -> PlainStream | TlsStream:
    plain = PlainStream.connect(host, port, ipv6=":" in host, timeout=_CONNECT_S, attempts=1, nodelay=True)
    enable_keepalive(plain.sock)
    if tls is None:
        plain.sock.settimeout(_SEND_S)
        return plain
    plain.sock.settimeout(_CONNECT_S)
    return TlsStream(tls.wrap_socket(plain.sock, server_hostname=host), _SEND_S)


class _CallingConnection(rpyc.Connection):
    """Calls the server's exposed methods; exposes none itself."""

    def start_call(
        self, root: Any, data: bytes, kind: Any, future: Future[Any], on_value: Callable[[Any], bool] | None
    ) -> None:
        def settle(is_exception: bool, reply: Any) -> bool:
            """Settle the future of a call, or deliver one of its values; whether more replies follow."""
            try:
                if is_exception:
                    why = reply.args[0] if reply.args else type(reply).__name__
                    raise BadRequest(
                        f"the server refused the call: {why}; this client uses protocol {PROTOCOL_VERSION}; install "
                        "the same version of vlora on both sides"
                    )
                value = open_reply(reply, kind)
                if on_value is not None and on_value(value):
                    return True
                if future.set_running_or_notify_cancel():
                    future.set_result(value)
            except Exception as error:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            return False

        name = "exposed_call" if on_value is None else "exposed_stream"
        self._async_request(consts.HANDLE_CALLATTR, (root, name, (data,), ()), settle)

    def _seq_request_callback(self, msg: int, seq: int, is_exc: bool, obj: Any) -> None:
        """As in RPyC, except that a call with more replies to come keeps its number."""
        callback = self._request_callbacks.pop(seq, None)
        if callback is not None and callback(is_exc, obj) is True:
            self._request_callbacks[seq] = callback

    def _dispatch_request(self, seq: int, raw_args: Any) -> None:
        self._send(
            consts.MSG_EXCEPTION, seq, self._box_exc(PermissionError, ValueError("a client serves nothing"), None)
        )
