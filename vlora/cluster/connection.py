"""A front end's connection to a replica's engine, and the replica's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.errors import BadConfig
from vlora.wire import connection
from vlora.wire.address import Address
from vlora.wire.framing import MessageTransport
from vlora.wire.handshake import Protocol, read_about
from vlora.wire.heartbeat import Silence
from vlora.wire.tls import Certificate

MIN_BEAT_S, MAX_BEAT_S = 0.01, 60.0
_VALID = datetime.timedelta(days=3650)  # peers compare a certificate, not its dates


def protocol(server: str = "replica", version: str | None = None) -> Protocol:
    """version: of vlora on this end; None is the installed one."""
    return Protocol(server, f"vlora {version or importlib.metadata.version('vlora')}, protocol 5", "cluster secret")


async def connect(
    address: Address,
    secret: bytes,
    *,
    tls: bool,
    beat_s: float,
    key: str,
    server: str = "replica",
    version: str | None = None,
) -> EngineClient:
    """Connect to a replica's engine, or to another front end.

    Args:
        beat_s: How often a message will be sent at least, see `watch_beats`.
        key: Of this front end: a later connection with it replaces this one.
        version: For tests.

    Raises:
        Unauthorized, BadConfig: As `handshake.introduce`.
        Disconnected: There is no replica at the address, or it does not answer in time.
    """
    about = msgspec.msgpack.encode((key, beat_s))
    transport, inbox, ready = await connection.connect(
        address, protocol(server, version), secret, messages.Ready, tls=tls, about=about
    )
    client = EngineClient(_RemoteProcess(transport), transport, ready)
    inbox.hand_over(transport, transport.on_message)
    return client


def said_by(about: bytes) -> tuple[str, float]:
    """A front end's key and `beat_s`. Raises BadConfig."""
    key, beat_s = read_about(about, tuple[str, float])
    if not MIN_BEAT_S <= beat_s <= MAX_BEAT_S:
        raise BadConfig(f"beat_s is {beat_s:g}; it must be between {MIN_BEAT_S:g} and {MAX_BEAT_S:g} seconds")
    return key, beat_s


class _RemoteProcess:
    """An engine process behind a connection: its end is known as the end of the connection."""

    def __init__(self, transport: MessageTransport) -> None:
        self._transport = transport

    async def wait(self) -> int | None:
        await asyncio.wait({self._transport.closed})
        return None

    def kill(self) -> None:
        self._transport.close()


async def watch_beats(client: EngineClient, beat_s: float, num_missed: int, step_s: float) -> str:
    """Ping an engine until it gives no more sign of life: until no bytes arrive.

    A ping may wait behind a large message. The replica pings the engine too while bytes arrive there, so the engine's
    answers come during a long transfer as well.

    Args:
        beat_s: The time between two pings.
        num_missed: Beats in a row without a byte from the engine that end this.
        step_s: A step that runs for longer ends this too.

    Returns:
        The reason.
    """
    silence = Silence(lambda: client.num_bytes_received)
    while True:
        client.ping()
        await asyncio.sleep(beat_s)
        if (missed := silence.beat()) >= num_missed:
            return f"it gave no sign of life for {missed * beat_s:g} s"
        pong = client.pong
        if pong is not None and pong.step_s > step_s:
            return f"its step has been running for {pong.step_s:.0f} s, over the limit of {step_s:g} s"


@contextlib.contextmanager
def own_certificate() -> Iterator[Certificate]:
    """A new certificate, signed by itself, whose files exist until the end of the block."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "vlora replica")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    cert = builder.not_valid_before(now - _VALID).not_valid_after(now + _VALID).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tempfile.TemporaryDirectory(prefix="vlora-") as folder:  # only this user can use it
        made = Certificate(f"{folder}/cert.pem", f"{folder}/key.pem")
        Path(made.cert_file).write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        Path(made.key_file).write_bytes(private)
        yield made
