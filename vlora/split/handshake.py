"""The executor's side of a greeting: TLS, token, fingerprint, shared memory. Runs in a thread for each new client."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Sequence

import msgspec

from vlora.auth_rate_limit import AuthRateLimit
from vlora.config import Token
from vlora.errors import BadConfig, OverCapacity, Unauthorized, VLoraError
from vlora.split import challenge, transport
from vlora.split.executor import BaseExecutor
from vlora.split.frames import MAX_GREETING_BYTES, NONCE_BYTES, PROTOCOL, Challenge, Hello, Proof, Refused, Welcome
from vlora.split.peer import Peer

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
    greeting_s: float = 10.0


class Greeter:
    """Admits clients. Thread-safe.

    Attributes:
        tokens: Of the permitted clients; none admits all. May be replaced at any time.
    """

    def __init__(
        self,
        executor: BaseExecutor,
        limits: Limits,
        *,
        tokens: Sequence[Token] = (),
        tls: ssl.SSLContext | None = None,
        rate_limit: AuthRateLimit | None = None,
        places: threading.Semaphore,
    ) -> None:
        """tls: for TCP; Unix sockets never use it. places: for clients; the server releases them."""
        self._executor = executor
        self._limits = limits
        self.tokens = tokens
        self._tls = tls
        self._rate_limit = rate_limit
        self._places = places

    def greet(self, sock: socket.socket) -> Peer | None:
        """Admit a client; None if it was refused: its connection is closed, with one line in the log."""
        local = sock.family == socket.AF_UNIX
        origin = "a local client" if local else "a client over TCP"
        deadline = time.monotonic() + self._limits.greeting_s
        try:
            if not local:
                origin = str(sock.getpeername()[0])  # fails if the client is gone already
            sock.settimeout(self._limits.greeting_s)
            transport.tune(sock)
            if self._tls is not None and not local:
                sock = self._tls.wrap_socket(sock, server_side=True)
            return self._admitted(sock, origin, deadline)
        except VLoraError as error:
            log.warning("%s was refused: %s", origin, error)
            with contextlib.suppress(OSError):
                transport.send_message(sock, Refused(error.code, str(error)))
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s was not admitted: %s", origin, _reason(error))
        sock.close()
        return None

    def _admitted(self, sock: socket.socket, origin: str, deadline: float) -> Peer:
        """Exchange the greeting's messages. Raises VLoraError, OSError, MsgspecError."""
        limits, executor = self._limits, self._executor
        hello = transport.receive_message(sock, Hello, MAX_GREETING_BYTES, deadline)
        nonce = secrets.token_bytes(NONCE_BYTES)
        transport.send_message(sock, Challenge(nonce, bool(self.tokens)))
        proof = transport.receive_message(sock, Proof, MAX_GREETING_BYTES, deadline)
        if hello.protocol != PROTOCOL:
            raise BadConfig(
                f"the client speaks protocol {hello.protocol}, this executor {PROTOCOL}; update one of them"
            )
        token = self._authenticate(None if sock.family == socket.AF_UNIX else origin, proof, hello, nonce)
        if hello.fingerprint not in ("", executor.fingerprint):
            raise BadConfig(
                f"another base model is served here now ({executor.name}); restart the client with this model"
            )
        if not self._places.acquire(blocking=False):
            raise OverCapacity(f"this base executor has {limits.max_clients} clients, its maximum; try again later")
        try:
            return self._welcomed(sock, origin, hello, nonce, token)
        except BaseException:
            self._places.release()
            raise

    def _welcomed(self, sock: socket.socket, origin: str, hello: Hello, nonce: bytes, token: Token | None) -> Peer:
        """Describe the base to an admitted client. Raises OSError."""
        local, limits, executor = sock.family == socket.AF_UNIX, self._limits, self._executor
        own = b"" if token is None else challenge.prove(token.secret, "base", hello.nonce, nonce)
        welcome = Welcome(
            own,
            executor.name,
            executor.fingerprint,
            str(executor.dtype).removeprefix("torch."),
            executor.shard,
            tuple(executor.groups),
            limits.max_rows,
            limits.half_bytes,
            executor.instance,
        )
        name = "".join(letter for letter in hello.client[:80] if letter.isprintable())
        name = f"client {name!r} at {origin}" if not local else f"client {name!r}"
        if not (local and hello.shared_memory):
            transport.send_message(sock, welcome)
            return Peer(sock, name, None, limits.half_bytes, lambda: self._permits(token))
        descriptor = transport.create_shared_memory(2 * limits.half_bytes)
        try:
            slot = transport.map_memory(descriptor, 2 * limits.half_bytes)
            transport.send_message(sock, welcome, (descriptor,))
        finally:
            os.close(descriptor)
        return Peer(sock, name, slot, 0, lambda: self._permits(token))

    def _permits(self, token: Token | None) -> bool:
        return token is None or (token in self.tokens and not challenge.has_expired(token))

    def _authenticate(self, origin: str | None, proof: Proof, hello: Hello, nonce: bytes) -> Token | None:
        """The client's token. origin: where wrong tokens are counted; None for clients on this machine."""
        if self._rate_limit is None or origin is None:
            return challenge.check(self.tokens, proof.digest, hello.nonce, nonce)
        self._rate_limit.check(origin)
        try:
            return challenge.check(self.tokens, proof.digest, hello.nonce, nonce)
        except Unauthorized:
            if proof.digest:
                self._rate_limit.record_failure(origin)
            raise


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the greeting was not completed in time"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {transport.tls_reason(error)}"
    if isinstance(error, msgspec.MsgspecError):
        return "its greeting is not of this protocol"
    return str(error) or type(error).__name__
