"""Admission of clients to a base executor: TLS, token, fingerprint, shared memory. A thread for each new client."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Collection, Sequence

import msgspec

from vlora.config import Token
from vlora.errors import BadConfig, OverCapacity, Unauthorized, VLoraError
from vlora.rate_limits import AuthRateLimit
from vlora.split import transport
from vlora.split.executor import BaseExecutor
from vlora.split.frames import PROTOCOL, BaseInfo, ClientInfo
from vlora.split.peer import Peer
from vlora.wire import framing, handshake
from vlora.wire.handshake import printable

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on clients.

    Attributes:
        max_rows: Maximum rows of a call; clients divide larger ones.
        half_bytes: Maximum bytes of a call's inputs, and of its outputs.
        stall_s: Time after which an incomplete call or reply that does not move ends the connection.
    """

    max_clients: int = 64
    max_rows: int = 4096
    half_bytes: int = 32 * 2**20
    stall_s: float = 10.0
    handshake_s: float = 10.0


@dataclasses.dataclass(eq=False)
class Admission:
    """Admits clients. Thread-safe.

    Attributes:
        tokens: Of the permitted clients; none admits all. May be replaced at any time.
        tls: For TCP; Unix sockets never use it.
        client_slots: Free slots of clients. The server releases that of a client that has left.
    """

    executor: BaseExecutor
    limits: Limits
    tokens: Sequence[Token]
    tls: ssl.SSLContext | None

    def __post_init__(self) -> None:
        self._rate_limit = AuthRateLimit()
        self.client_slots = threading.Semaphore(self.limits.max_clients)

    def admit(self, sock: socket.socket) -> Peer | None:
        """Admit a client; None if it was refused: its connection is closed, with one line in the log."""
        local = sock.family == socket.AF_UNIX
        origin = "a local client" if local else "a client over TCP"
        deadline = time.monotonic() + self.limits.handshake_s
        try:
            if not local:
                origin = str(sock.getpeername()[0])  # fails if the client is gone already
            sock.settimeout(self.limits.handshake_s)
            transport.tune(sock)
            if self.tls is not None and not local:
                sock = self.tls.wrap_socket(sock, server_side=True)
            return self._admitted(sock, origin, deadline)
        except VLoraError as error:
            log.warning("%s was refused: %s", origin, error)
            with contextlib.suppress(OSError):
                framing.send(sock, handshake.refusal(error))
        except OSError as error:
            log.warning("%s was refused: %s", origin, _reason(error))
        sock.close()
        return None

    def _admitted(self, sock: socket.socket, origin: str, deadline: float) -> Peer:
        """Raises VLoraError, OSError."""
        is_counted = sock.family != socket.AF_UNIX
        tokens: dict[bytes, Token] = {}

        def secrets_now() -> Collection[bytes]:
            tokens.update((token.secret.encode(), token) for token in self.tokens)
            return tokens

        def count() -> None:
            if is_counted:
                self._rate_limit.record_failure(origin)

        def receive() -> bytes:
            data = framing.receive(sock, handshake.MAX_BYTES, deadline)
            if is_counted:
                self._rate_limit.check(origin)  # also before each comparison
            return data

        exchange = handshake.admit(PROTOCOL, secrets_now, peer=origin, on_wrong=count)
        found = handshake.run(exchange, lambda data: framing.send(sock, data), receive)
        token = None if found.secret is None else tokens[found.secret]
        if token is not None and token.expires is not None and has_expired(token):
            count()
            raise Unauthorized(f"the token expired at {token.expires.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC")
        client = handshake.read_about(found.about, ClientInfo)
        if client.fingerprint not in ("", self.executor.fingerprint):
            raise BadConfig(
                f"another base model is served here now ({self.executor.name}); restart the client with this model"
            )
        if not self.client_slots.acquire(blocking=False):
            raise OverCapacity(
                f"this base executor has {self.limits.max_clients} clients, its maximum; try again later"
            )
        try:
            return self._welcomed(sock, origin, client, found, token)
        except BaseException:
            self.client_slots.release()
            raise

    def _welcomed(
        self, sock: socket.socket, origin: str, client: ClientInfo, found: handshake.Admitted, token: Token | None
    ) -> Peer:
        """Describe the base to an admitted client. Raises OSError."""
        local, limits, executor = sock.family == socket.AF_UNIX, self.limits, self.executor
        info = BaseInfo(
            executor.name,
            executor.fingerprint,
            str(executor.dtype).removeprefix("torch."),
            executor.shard,
            tuple(executor.groups),
            limits.max_rows,
            limits.half_bytes,
            executor.instance,
        )
        welcome = found.welcome(msgspec.msgpack.encode(info))
        name = f"client {printable(client.client)!r}" + ("" if local else f" at {origin}")
        if not (local and client.shared_memory):
            framing.send(sock, welcome)
            return Peer(sock, name, None, limits.half_bytes, lambda: self._permits(token))
        descriptor = transport.create_shared_memory(2 * limits.half_bytes)
        try:
            slot = transport.map_memory(descriptor, 2 * limits.half_bytes)
            framing.send(sock, welcome, (descriptor,))
        finally:
            os.close(descriptor)
        return Peer(sock, name, slot, 0, lambda: self._permits(token))

    def _permits(self, token: Token | None) -> bool:
        return token is None or (token in self.tokens and not has_expired(token))


def has_expired(token: Token) -> bool:
    return token.expires is not None and datetime.datetime.now(datetime.UTC) >= token.expires


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the handshake was not completed in time"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {transport.tls_reason(error)}"
    return str(error) or type(error).__name__
