"""One RPyC connection, shared by any number of threads: callers send calls, a reader thread sets their futures."""

from __future__ import annotations

import contextlib
import itertools
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import rpyc
from rpyc.core import consts
from rpyc.core.channel import Channel

from vlora.client.calls import Call
from vlora.client.keepalive import enable_keepalive
from vlora.client.plain import PlainStream
from vlora.client.tls import TlsStream, shut_down
from vlora.client.values import PROTOCOL_VERSION, Hello, open_reply
from vlora.errors import BadConfig, BadRequest, DeadlineMissed, Disconnected, TooLarge, VLoraError

T = TypeVar("T")

_CONNECT_S = 5.0
_SEND_S = 60.0  # a server that reads nothing for this long counts as disconnected


def address_of(text: str, name: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. name: for the error. Raises BadConfig."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadConfig(f"{name} is {text!r}; write HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


class ServerConnection:
    """A connection to the server. Raises Disconnected if the server cannot be reached, BadRequest if it uses another
    protocol version, Unauthorized if it rejects the token.
    """

    def __init__(self, host: str, port: int, token: str | None, tls: ssl.SSLContext | None) -> None:
        self._address = f"{host}:{port}"
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
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
            self.hello = self.wait(self.start(Call("hello", (token,), Hello)), _CONNECT_S)
        except VLoraError:
            self.close()
            raise
        if self.hello.protocol != PROTOCOL_VERSION:
            self.close()
            raise BadRequest(
                f"the server at {self._address} uses protocol {self.hello.protocol}, this client {PROTOCOL_VERSION}; "
                "install the same version of vlora on both sides"
            )

    @property
    def closed(self) -> bool:
        return not self._reader.is_alive()

    def numbered(self, call: Call[T]) -> Call[T]:
        """The call with a number that is unique on this connection, if it can be cancelled by it."""
        return call._replace(args=(next(self._call_ids), *call.args)) if call.cancellable else call

    def start(self, call: Call[T], on_value: Callable[[T], bool] | None = None) -> Future[T]:
        """Send a call; its future receives the value or the typed error. Does not wait for the answer.

        on_value: for a call with several values: called with each value in the reader's thread; returns whether more
        follow. The future receives the last one.
        """
        if call.num_bytes > (limit := self.hello.max_message_bytes if call.num_bytes else 0):
            raise TooLarge(f"the request has {call.num_bytes} bytes of images; this server takes at most {limit}")
        future: Future[T] = Future()
        with self._lock:
            if self.closed:
                raise self._disconnected()
            self._pending.add(future)
        future.add_done_callback(self._settle)  # before any reply can arrive
        try:
            self._rpyc.start_call(self._root, call, future, on_value)
        except UnicodeEncodeError as error:
            self._settle(future)
            raise BadRequest(f"the text cannot be sent: {error}") from error
        except (OSError, EOFError, RuntimeError) as error:  # RuntimeError: RPyC's cleanup has released its lock
            self._settle(future)
            raise self._disconnected() from error
        return future

    def wait(self, future: Future[T], timeout_s: float) -> T:
        """The call's value. Raises DeadlineMissed if it takes longer than `timeout_s`, or the error of the call."""
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise DeadlineMissed(f"no answer from {self._address} within {timeout_s:g} s") from error

    def abandon(self, call: Call[Any]) -> None:
        """Cancel an abandoned request on the server; without a connection the server cancels it itself."""
        if call.cancellable:
            with contextlib.suppress(VLoraError):
                self.start(Call("cancel", call.args[:1], type(None)))

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

    def start_call(self, root: Any, call: Call[T], future: Future[T], on_value: Callable[[T], bool] | None) -> None:
        def settle(is_exception: bool, reply: Any) -> bool:
            """Settle the future of a call, or deliver one of its values; whether more replies follow."""
            try:
                if is_exception:
                    why = reply.args[0] if reply.args else type(reply).__name__
                    raise BadRequest(f"the server refused the call {call.name!r}: {why}")
                value = open_reply(reply, call.returns)
                if on_value is not None and on_value(value):
                    return True
                if future.set_running_or_notify_cancel():
                    future.set_result(value)
            except Exception as error:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            return False

        self._async_request(consts.HANDLE_CALLATTR, (root, f"exposed_{call.name}", call.args, ()), settle)

    def _seq_request_callback(self, msg: int, seq: int, is_exc: bool, obj: Any) -> None:
        """As in RPyC, except that a call with more replies to come keeps its number."""
        callback = self._request_callbacks.pop(seq, None)
        if callback is not None and callback(is_exc, obj) is True:
            self._request_callbacks[seq] = callback

    def _dispatch_request(self, seq: int, raw_args: Any) -> None:
        self._send(
            consts.MSG_EXCEPTION, seq, self._box_exc(PermissionError, ValueError("a client serves nothing"), None)
        )
