"""A front end's connection to a replica's engine."""

from __future__ import annotations

import asyncio
import importlib.metadata

import msgspec

from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.errors import BadConfig
from vlora.wire import connection
from vlora.wire.address import Address
from vlora.wire.framing import MessageTransport
from vlora.wire.handshake import Protocol, read_about
from vlora.wire.heartbeat import Silence

MIN_BEAT_S, MAX_BEAT_S = 0.01, 60.0


def protocol(server: str = "replica", version: str | None = None) -> Protocol:
    """version: of vlora on this end; None is the installed one."""
    return Protocol(server, f"vlora {version or importlib.metadata.version('vlora')}, protocol 3", "cluster secret")


async def connect(
    address: Address, secret: bytes, *, tls: bool, beat_s: float, version: str | None = None
) -> EngineClient:
    """Connect to a replica's engine.

    Args:
        beat_s: How often a message will be sent at least, see `watch_beats`.
        version: For tests.

    Raises:
        Unauthorized, BadConfig: As `handshake.introduce`.
        Disconnected: There is no replica at the address, or it does not answer in time.
    """
    about = msgspec.msgpack.encode(beat_s)
    transport, inbox, ready = await connection.connect(
        address, protocol(version=version), secret, messages.Ready, tls=tls, about=about
    )
    client = EngineClient(_RemoteProcess(transport), transport, ready)
    inbox.hand_over(transport, transport.on_message)
    return client


def beat_of(about: bytes) -> float:
    """A front end's `beat_s`. Raises BadConfig."""
    beat_s = read_about(about, float)
    if not MIN_BEAT_S <= beat_s <= MAX_BEAT_S:
        raise BadConfig(f"beat_s is {beat_s:g}; it must be between {MIN_BEAT_S:g} and {MAX_BEAT_S:g} seconds")
    return beat_s


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
