"""How both ends of a line prove that they know the shared secret. The secret itself is never sent.

Each end sends a random nonce, then a keyed hash of both nonces, its role, both versions and the server's certificate. A
recorded proof is of no use for other nonces, a proof cannot be sent back because of its role, and a third party between
two ends of TLS has another certificate, so certificates need no authority.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from vlora.errors import BadConfig, Disconnected, Unauthorized, VLoraError
from vlora.types import ErrorValue

PROTOCOL = 2
MAX_BYTES = 4096
"""The largest message before both ends have proved themselves."""

MAX_SHOWN_VERSION, MAX_SHOWN_ERROR = 64, 500
"""Characters of a peer without a proof that are logged."""

MIN_SECRET_BYTES = 16
MIN_BEAT_S, MAX_BEAT_S = 0.01, 60.0
_NONCE_BYTES = 32
_CLIENT, _SERVER = b"front end", b"replica"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The client's first message. beat_s: it sends a message at least this often."""

    protocol: int
    version: str
    nonce: bytes
    beat_s: float


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The server's answer."""

    protocol: int
    version: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag=True):
    digest: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The server's proof. The engine's messages follow."""

    digest: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server closes the line."""

    error: ErrorValue


Message = Hello | Challenge | Proof | Welcome | Refused
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode

Send = Callable[[bytes], None]
Receive = Callable[[], Awaitable[bytes]]


def own_version() -> str:
    return importlib.metadata.version("vlora")


def check_secret(secret: bytes) -> bytes:
    """Raises BadConfig for a secret that could be guessed."""
    if len(secret) < MIN_SECRET_BYTES:
        raise BadConfig(
            f"the cluster's secret has {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}, for example from "
            "`openssl rand -hex 32`"
        )
    return secret


async def introduce(
    send: Send,
    receive: Receive,
    secret: bytes,
    *,
    peer: str,
    beat_s: float,
    certificate: bytes = b"",
    version: str | None = None,
    role: str = "replica",
) -> None:
    """The front end's part.

    Args:
        send, receive: The line's messages.
        certificate: The server's certificate as this end sees it; empty without TLS.
        version: Of this end; None is the installed one.

    Raises:
        Unauthorized: The secrets differ.
        BadConfig: The versions differ.
        Disconnected: The peer is not a replica.
    """
    hello = Hello(PROTOCOL, version or own_version(), secrets.token_bytes(_NONCE_BYTES), beat_s)
    send(encode(hello))
    challenge = _read(await receive(), peer)
    if isinstance(challenge, Refused):
        raise _refusal(challenge)
    if not isinstance(challenge, Challenge):
        raise _unexpected(challenge, peer)
    _check_versions(
        challenge, hello, f"the {role} at {peer}", "this front end" if role == "replica" else "this machine"
    )
    send(encode(Proof(_digest(secret, _CLIENT, hello, challenge, certificate))))
    welcome = _read(await receive(), peer)
    if isinstance(welcome, Refused):
        raise _refusal(welcome)
    if not isinstance(welcome, Welcome):
        raise _unexpected(welcome, peer)
    if not hmac.compare_digest(welcome.digest, _digest(secret, _SERVER, hello, challenge, certificate)):
        raise Unauthorized(
            f"{peer} did not prove that it knows the cluster's secret; set the same secret on both ends, and let no "
            "proxy decrypt TLS"
        )


async def admit(
    send: Send, receive: Receive, secret: bytes, *, peer: str, certificate: bytes = b"", version: str | None = None
) -> Hello:
    """The replica's part; the arguments and errors are those of `introduce`. The peer is sent the error.

    Returns:
        The front end's first message.
    """
    try:
        hello = _read(await receive(), peer)
        if not isinstance(hello, Hello):
            raise _unexpected(hello, peer)
        if not MIN_BEAT_S <= hello.beat_s <= MAX_BEAT_S:
            raise BadConfig(f"beat_s is {hello.beat_s:g}; it must be between {MIN_BEAT_S:g} and {MAX_BEAT_S:g} seconds")
        challenge = Challenge(PROTOCOL, version or own_version(), secrets.token_bytes(_NONCE_BYTES))
        # A peer of another version gets this too, and compares the versions itself.
        send(encode(challenge))
        _check_versions(hello, challenge, f"the front end at {peer}", "this replica")
        proof = _read(await receive(), peer)
        if not isinstance(proof, Proof):
            raise _unexpected(proof, peer)
        if not hmac.compare_digest(proof.digest, _digest(secret, _CLIENT, hello, challenge, certificate)):
            raise Unauthorized("the cluster's secret differs; front end and replicas need the same one")
        send(encode(Welcome(_digest(secret, _SERVER, hello, challenge, certificate))))
        return hello
    except VLoraError as error:
        send(encode(Refused(ErrorValue.of(error))))
        raise


def _digest(secret: bytes, role: bytes, hello: Hello, challenge: Challenge, certificate: bytes) -> bytes:
    parts = (
        role,
        hello.nonce,
        challenge.nonce,
        f"{hello.protocol} {hello.version} {challenge.protocol} {challenge.version}".encode(),
        hashlib.sha256(certificate).digest(),
    )
    data = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, data, "sha256")


def _check_versions(theirs: Hello | Challenge, ours: Hello | Challenge, them: str, us: str) -> None:
    if (theirs.protocol, theirs.version) != (ours.protocol, ours.version):
        version = theirs.version[:MAX_SHOWN_VERSION]
        raise BadConfig(
            f"{them} runs vlora {version!r} with protocol {theirs.protocol}, {us} vlora {ours.version!r} with protocol "
            f"{ours.protocol}; install the same version on both"
        )
    if len(theirs.nonce) < _NONCE_BYTES:
        raise Disconnected(f"{them} sent a nonce of {len(theirs.nonce)} bytes; {_NONCE_BYTES} are needed")


def _read(data: bytes, peer: str) -> Message:
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise Disconnected(f"{peer} does not speak the protocol of replicas: {_one_line(str(error))}") from error


def _refusal(refused: Refused) -> VLoraError:
    return ErrorValue(_one_line(refused.error.code), _one_line(refused.error.message)).to_exception()


def _one_line(text: str) -> str:
    """A peer's text without escapes and newlines, which would forge lines of the log."""
    return "".join(each if each.isprintable() else "?" for each in text[:MAX_SHOWN_ERROR])


def _unexpected(message: Message, peer: str) -> Disconnected:
    return Disconnected(f"{peer} does not speak the protocol of replicas: it sent {type(message).__name__} out of turn")
