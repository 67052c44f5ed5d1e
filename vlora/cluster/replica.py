"""A replica: an engine process, and the listener through which a front end reaches it. Both end together.

Run as `python -m vlora.cluster.replica`, with a `ReplicaSettings` on stdin. It prints its port and the id of its
engine's process, or an `ErrorValue` as JSON if it cannot start. It ends when stdin is closed, or after a time without a
front end. It loads no torch.

Several front ends may use it at once (`peers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

import msgspec

from vlora.cluster.connection import own_certificate, protocol, said_by
from vlora.cluster.model_files import model_digest, own_path
from vlora.cluster.peers import Peer, Peers
from vlora.config import EngineConfig
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import ENGINE_COMMAND, start_process
from vlora.errors import BadConfig, VLoraError
from vlora.logging_format import configure
from vlora.types import ErrorValue
from vlora.wire.address import Address
from vlora.wire.connection import Listener
from vlora.wire.framing import MessageTransport, read_value
from vlora.wire.heartbeat import Silence
from vlora.wire.tls import Certificate

log = logging.getLogger("vlora.cluster")

MISSED_BEATS = 20
"""Beats without a byte after which a front end counts as gone. More than the front end itself allows a replica: its
pause should not end the requests of all replicas."""

ALONE_S = 60.0


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replica's process. They come over stdin, because other users can read a command line.

    Attributes:
        secret: See `vlora.wire.handshake`.
        host: Where it listens: with a certificate of its own, except on loopback.
        model_digest: See `model_digest`, of the front end; empty to use any model.
        command: Starts the engine process; where the first word is empty, with the Python of this machine.
        alone_s: It ends after so many seconds without a front end.
    """

    config: EngineConfig
    secret: bytes
    host: str = "127.0.0.1"
    model_digest: str = ""
    command: tuple[str, ...] = ENGINE_COMMAND
    alone_s: float = ALONE_S


class Replica:
    """An engine, and a listener for its front ends. Created by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, engine: MessageTransport, ready: messages.Ready) -> None:
        self._process = process
        self._engine = engine
        self._ready = ready
        self._peers = Peers(engine.send)
        self._lines: dict[str, tuple[MessageTransport, asyncio.Task[None]]] = {}  # by the keys of front ends
        self._listener: Listener | None = None
        self._alone_since = asyncio.get_running_loop().time()
        engine.on_message = self._peers.from_engine

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        secret: bytes,
        address: Address,
        *,
        certificate: Certificate | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> Replica:
        """Start the engine process, then listen.

        Raises:
            BadConfig: As `Listener.open`.
            VLoraError: As `start_process`.
        """
        self = cls(*await start_process(config, command=command))
        try:
            self._listener = await Listener.open(address, protocol(), secret, self._admit, certificate=certificate)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def port(self) -> int:
        assert self._listener is not None
        return self._listener.port

    @property
    def engine_pid(self) -> int:
        return self._ready.pid

    async def wait_ended(self) -> None:
        await asyncio.wait({self._engine.closed})

    async def wait_alone(self, alone_s: float) -> None:
        """Wait until there has been no front end for a time."""
        loop = asyncio.get_running_loop()
        while self._lines or loop.time() - self._alone_since < alone_s:
            await asyncio.sleep(alone_s / 20)
        log.warning("there has been no front end for %g s; this replica ends", alone_s)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for key in tuple(self._lines):
            self._end(key)
        await self._peers.files.close()
        self._engine.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    # -- front ends ---------------------------------------------------------------------------------------------------

    def _admit(self, transport: MessageTransport, about: bytes, address: str) -> bytes:
        key, beat_s = said_by(about)
        if key in self._lines:
            log.warning("the front end at %s has connected again", address)
            self._end(key)
        peer = self._peers.present[key] = Peer(transport.send)
        watching = asyncio.create_task(self._watch(key, transport, address, beat_s), name="vlora-replica-beats")
        self._lines[key] = transport, watching
        transport.on_message = lambda data: self._peers.from_peer(peer, data)
        return messages.encode(self._ready)

    def _end(self, key: str) -> None:
        transport, watching = self._lines.pop(key)
        transport.close()
        watching.cancel()
        self._peers.leave(key)
        self._alone_since = asyncio.get_running_loop().time()

    async def _watch(self, key: str, transport: MessageTransport, address: str, beat_s: float) -> None:
        """Notice the end of a front end, also if its connection stays open. Ping the engine while it is heard."""
        silence = Silence(lambda: transport.num_bytes_received)
        missed = 0
        while missed < MISSED_BEATS:
            await asyncio.wait({transport.closed}, timeout=beat_s)
            if transport.closed.done():
                error = transport.closed.exception()
                level = logging.INFO if error is None else logging.WARNING
                log.log(level, "the front end at %s is gone%s", address, "" if error is None else f": {error}")
                break
            if not (missed := silence.beat()):
                self._engine.send(messages.PING)  # the front end's own pings may wait behind a large message
        else:
            log.warning("the front end at %s gave no sign of life for %g s", address, missed * beat_s)
        self._end(key)


async def serve(settings: ReplicaSettings) -> int:
    """Run a replica until its engine ends, or until it is not needed any more; returns the exit code."""
    config = dataclasses.replace(settings.config, model=own_path(settings.config.model))
    if settings.model_digest not in ("", model_digest(config.model)):
        raise BadConfig(
            f"the model {config.model!r} is missing on {settings.host}, or differs from that of the front end; copy "
            "the same files to all nodes"
        )
    first, *others = settings.command
    command = (first or sys.executable, *others)
    unneeded = asyncio.create_task(_wait_stdin())
    with contextlib.nullcontext() if Address(settings.host, 0).is_local else own_certificate() as certificate:
        starting = asyncio.create_task(
            Replica.start(config, settings.secret, Address(settings.host, 0), certificate=certificate, command=command)
        )
        await asyncio.wait({starting, unneeded}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return 0
    replica = starting.result()
    _print(f"{replica.port} {replica.engine_pid}")
    ended = asyncio.create_task(replica.wait_ended())
    alone = asyncio.create_task(replica.wait_alone(settings.alone_s))
    await asyncio.wait({ended, unneeded, alone}, return_when=asyncio.FIRST_COMPLETED)
    code = 1 if ended.done() else 0
    await replica.close()
    return code


async def _wait_stdin() -> None:
    """Wait for the end of stdin: nothing else follows the settings."""
    ended = asyncio.Event()
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    loop.add_reader(stdin, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(stdin)


def _print(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the starting process has ended
        print(line, flush=True)


def main() -> None:
    configure(os.environ)
    settings = read_value(sys.stdin.buffer, ReplicaSettings)
    try:
        code = asyncio.run(serve(settings))
    except VLoraError as error:
        _print(msgspec.json.encode(ErrorValue.of(error)).decode())
        code = 2
    with contextlib.suppress(BrokenPipeError):  # the front end, which reads the log, has ended
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
