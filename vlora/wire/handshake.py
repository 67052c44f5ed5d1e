"""How both ends of a connection prove that they know a shared secret, which is never sent.

Each end sends a random nonce in its first message, then a keyed hash of its role, of both first messages and of the
server's certificate. A recorded proof is of no use for other nonces, a proof cannot be sent back because of its role,
and a third party between two ends of TLS has another certificate, so certificates need no authority.

Each end is a generator without I/O: it yields a message to send and is sent the next message that arrives.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, Generator
from typing import Literal, NamedTuple, TypeVar

import msgspec

from vlora.errors import BadConfig, Disconnected, Unauthorized, VLoraError
from vlora.types import ErrorValue

MAX_BYTES = 1 << 14
"""The largest message to a server before it knows the client."""
MAX_WELCOME_BYTES = 1 << 26

_MAX_SHOWN = 400
_NONCE_BYTES = 32

UNREADABLE = (msgspec.MsgspecError, RecursionError)  # of decoding; the second one for deeply nested values

T = TypeVar("T")
Exchange = Generator[bytes, bytes, T]
"""Yields messages to send, of which an empty one is not sent."""


class Protocol(NamedTuple):
    """Attributes:
    server: What users call the server, such as "replica".
    version: Must be equal on both ends.
    secret: What users call the secret, such as "token".
    """

    server: str
    version: str
    secret: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The client's first message. about: of the protocol's user. Whoever answers at the address can read it."""

    version: str
    nonce: bytes
    about: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The server's first message. needs_proof: it has a secret."""

    version: str
    nonce: bytes
    needs_proof: bool


class Proof(msgspec.Struct, frozen=True, tag=True):
    """digest: empty without a secret."""

    digest: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The client is admitted; digest is the server's own proof."""

    digest: bytes
    about: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server closes the connection."""

    error: ErrorValue


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Hello | Challenge | Proof | Welcome | Refused).decode

M = TypeVar("M", Hello, Challenge, Proof, Welcome)


def introduce(
    protocol: Protocol, secret: bytes | None, *, peer: str, about: bytes = b"", certificate: bytes = b""
) -> Exchange[bytes]:
    """The client's part.

    Args:
        secret: None for a server that has none.
        peer: The server's address, for messages.
        certificate: The server's certificate as this end sees it; empty if an authority has vouched for it.

    Returns:
        `about` of the server's Welcome.

    Raises:
        Unauthorized: The secrets differ.
        BadConfig: The versions differ.
        Disconnected: The peer is no such server.
        VLoraError: The server's own reason for refusing.
    """
    hello = encode(Hello(protocol.version, secrets.token_bytes(_NONCE_BYTES), about))
    first = yield hello
    challenge = _read(Challenge, first, protocol, peer)
    _check(challenge, protocol, f"the {protocol.server} at {peer}")
    if secret is not None and not challenge.needs_proof:
        raise Unauthorized(
            f"{peer} does not ask for a {protocol.secret}, so it cannot prove that it knows yours; check the address, "
            f"or connect without a {protocol.secret} to a {protocol.server} that has none"
        )
    transcript = hello, first, certificate
    digest = b"" if secret is None else _digest(secret, "client", *transcript)
    welcome = _read(Welcome, (yield encode(Proof(digest))), protocol, peer)
    # The client decides whether a proof is needed: an impostor would say that none is.
    if secret is None:
        is_proved = not challenge.needs_proof
    else:
        is_proved = hmac.compare_digest(welcome.digest, _digest(secret, "server", *transcript, welcome.about))
    if not is_proved:
        raise Unauthorized(
            f"{peer} did not prove that it knows the {protocol.secret}; check the address, set the same "
            f"{protocol.secret} on both ends, and let no proxy decrypt TLS"
        )
    return welcome.about


class Admitted(NamedTuple):
    """A client that has proved itself. secret: the one that it knows; None if the server has none."""

    about: bytes
    secret: bytes | None
    transcript: tuple[bytes, bytes, bytes]

    def welcome(self, about: bytes = b"") -> bytes:
        """The last message to the client."""
        digest = b"" if self.secret is None else _digest(self.secret, "server", *self.transcript, about)
        return encode(Welcome(digest, about))


def admit(
    protocol: Protocol,
    secrets_now: Callable[[], Collection[bytes]],
    *,
    peer: str,
    certificate: bytes = b"",
    on_wrong: Callable[[], object] = lambda: None,
) -> Exchange[Admitted]:
    """The server's part. Its caller sends `Admitted.welcome`, or `refusal` of an error.

    Args:
        secrets_now: Called when a client has come; returns all that are valid; none admits any client.
        on_wrong: Called for a proof of none of them.

    Raises:
        Unauthorized, BadConfig, Disconnected: As `introduce`.
    """
    first = yield b""
    hello = _read(Hello, first, protocol, peer)
    known = secrets_now()
    challenge = encode(Challenge(protocol.version, secrets.token_bytes(_NONCE_BYTES), bool(known)))
    transcript = first, challenge, certificate
    second = yield challenge  # a client of another version gets this too, and compares the versions itself
    _check(hello, protocol, f"the client at {peer}")
    proof = _read(Proof, second, protocol, peer)
    if not known:
        return Admitted(hello.about, None, transcript)
    if not proof.digest:
        raise Unauthorized(f"this {protocol.server} requires a {protocol.secret}; connect with one")
    # All of them, in constant time.
    found = [each for each in known if hmac.compare_digest(proof.digest, _digest(each, "client", *transcript))]
    if not found:
        on_wrong()
        raise Unauthorized(f"the {protocol.secret} is not valid for this {protocol.server}; both need the same one")
    return Admitted(hello.about, found[0], transcript)


def read_about(data: bytes, kind: type[T]) -> T:
    """`about` of a Hello. Raises BadConfig."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise BadConfig(
            f"what the client says of itself cannot be read: {printable(str(error))}; install the same version on both"
        ) from error


def other_protocol(protocol: Protocol, peer: str, why: object) -> Disconnected:
    return Disconnected(
        f"{peer} has another protocol than a {protocol.server}, or another version of V-LoRA: {printable(str(why))}; "
        "check the address, and install the same version on both"
    )


def refusal(error: VLoraError) -> bytes:
    return encode(Refused(ErrorValue.of(error)))


def run(exchange: Exchange[T], send: Callable[[bytes], object], receive: Callable[[], bytes]) -> T:
    """Run one end in a thread."""
    try:
        message = next(exchange)
        while True:
            if message:
                send(message)
            message = exchange.send(receive())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def run_async(
    exchange: Exchange[T], send: Callable[[bytes], object], receive: Callable[[], Awaitable[bytes]]
) -> T:
    """Run one end in an event loop."""
    try:
        message = next(exchange)
        while True:
            if message:
                send(message)
            message = exchange.send(await receive())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def printable(text: str) -> str:
    """A peer's text without escapes and newlines, which would forge lines of the log."""
    return "".join(each if each.isprintable() else "?" for each in text[:_MAX_SHOWN])


def _digest(
    secret: bytes, role: Literal["client", "server"], hello: bytes, challenge: bytes, certificate: bytes, *more: bytes
) -> bytes:
    parts = role.encode(), hello, challenge, hashlib.sha256(certificate).digest(), *more
    return hmac.digest(secret, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def _check(theirs: Hello | Challenge, protocol: Protocol, them: str) -> None:
    if theirs.version != protocol.version:
        raise BadConfig(
            f"{them} has {printable(theirs.version)!r}, this end {protocol.version!r}; install the same version on both"
        )
    if len(theirs.nonce) < _NONCE_BYTES:
        raise Disconnected(f"{them} sent a nonce of {len(theirs.nonce)} bytes; {_NONCE_BYTES} are needed")


def _read(kind: type[M], data: bytes, protocol: Protocol, peer: str) -> M:
    try:
        message = _decode(data)
    except UNREADABLE as error:
        raise other_protocol(protocol, peer, error) from error
    if isinstance(message, Refused):
        if kind is Challenge and message.error.code == Disconnected.code:  # the server cannot read the Hello
            raise other_protocol(protocol, peer, message.error.message)
        reason = f"{protocol.server} at {peer}: {printable(message.error.message)}"
        raise ErrorValue(printable(message.error.code), reason).to_exception()
    if not isinstance(message, kind):
        raise other_protocol(protocol, peer, f"it sent {type(message).__name__} out of turn")
    return message
