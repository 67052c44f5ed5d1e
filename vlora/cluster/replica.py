"""A replica: an engine process, and the listener through which a front end reaches it. Both end together.

Run as `python -m vlora.cluster.replica`, with a `ReplicaSettings` on stdin. It prints its port and the id of its
engine's process, or an `ErrorValue` as JSON if it cannot start. It ends when stdin is closed, or after a time without a
front end. It loads no torch.

One front end is served at a time. A later one that knows the secret replaces it, as after a restart; the requests of
the former one are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vlora.cluster import adapter_messages
from vlora.cluster.adapter_messages import Files, FilesOperation, Finish, Hold, Offer, Piece
from vlora.cluster.adapter_store import AdapterStore, Busy, check_versions, default_root
from vlora.cluster.connection import beat_of, own_certificate, protocol
from vlora.cluster.model_files import model_digest, own_path
from vlora.config import EngineConfig
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import ENGINE_COMMAND, start_process
from vlora.errors import Aborted, BadConfig, OverCapacity, VLoraError
from vlora.logging_format import configure
from vlora.types import ErrorValue, RequestOutput
from vlora.wire.address import Address
from vlora.wire.connection import Listener
from vlora.wire.framing import MessageTransport, read_value
from vlora.wire.heartbeat import Silence
from vlora.wire.tls import Certificate

log = logging.getLogger("vlora.cluster")

MISSED_BEATS = 20
"""Beats without a byte after which a front end counts as gone. More than the front end itself allows a replica: its
pause should not end the requests of all replicas."""

MAX_WAITING = 64  # messages; a front end sends few before it waits for the answers
_CLOSE_S = 1.0

# The replica's end of shipped adapters: answers a front end's messages about files, in order, in a thread.


class _Waiting(NamedTuple):
    call_id: int
    operation: FilesOperation
    send: Callable[[bytes], object]


class AdapterReceiver:
    """The received adapters of one replica. Contents in use outlive a front end; incomplete ones do not."""

    def __init__(self, root: Path | None = None) -> None:
        """Create no folder and no thread yet. root: of the store; None: see `default_root`."""
        self._root = root
        self._store: AdapterStore | None = None  # used by the thread only
        self._thread = ThreadPoolExecutor(1, "vlora-adapter-files")
        self._calls: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._answering: asyncio.Task[None] | None = None

    def receive(self, call_id: int, operation: FilesOperation, send: Callable[[bytes], object]) -> None:
        if self._calls.qsize() >= MAX_WAITING:
            error = Aborted(f"{MAX_WAITING} messages about files wait on this machine; its disk may hang")
            send(messages.encode(messages.Reply(call_id, error=ErrorValue.of(error))))
            return
        self._calls.put_nowait(_Waiting(call_id, operation, send))
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer_all(), name="vlora-adapter-files")

    def front_end_left(self) -> None:
        """Drop incomplete contents, and answer no calls that wait."""
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None
            while not self._calls.empty():
                self._calls.get_nowait()
            self._thread.submit(self._abort_all)

    async def close(self) -> None:
        """Drop incomplete contents, and use nothing any more. If the disk hangs, the next process drops them."""
        self.front_end_left()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._close_store)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            call_id, operation, send = await self._calls.get()
            send(messages.encode(await loop.run_in_executor(self._thread, self._answer, call_id, operation)))

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _answer(self, call_id: int, operation: FilesOperation) -> messages.Reply[Files]:
        try:
            if self._store is None:
                self._store = AdapterStore(self._root or default_root(os.environ))
            return messages.Reply(call_id, _done(self._store, operation))
        except Busy:
            return messages.Reply(call_id, Files(busy=True))
        except OSError as error:
            log.warning("received adapters: %s", error)
            why = OverCapacity(f"its files cannot be written there: {error.strerror}")
            found = ErrorValue.of(why)
        except VLoraError as error:
            found = ErrorValue.of(error)
        except Exception as error:  # otherwise no later call would be answered
            log.exception("received adapters")
            found = ErrorValue.of(Aborted(f"internal error: {type(error).__name__}; the log of the replica has it"))
        if self._store is not None and not isinstance(operation, Hold):
            with contextlib.suppress(OSError):
                self._store.abort(operation.version)
        return messages.Reply(call_id, error=found)

    def _abort_all(self) -> None:
        if self._store is not None:
            self._store.abort_all()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()


def _done(store: AdapterStore, operation: FilesOperation) -> Files:
    match operation:
        case Offer():
            path = store.find(operation)
            if path is None and operation.receive and not store.begin(operation):
                path = store.finish(operation.version)
            return Files(path=path or "")
        case Piece():
            store.write(operation.version, operation.name, operation.data)
        case Finish():
            return Files(path=store.finish(operation.version))
        case Hold():
            check_versions(operation.versions)
            store.hold(operation.versions)
    return Files()


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
    """The engine of this replica, and its front end of the moment. Created by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, engine: MessageTransport, ready: messages.Ready) -> None:
        self._process = process
        self._engine = engine
        self._ready = ready
        self._peer: _Peer | None = None
        self._ending: Counter[str] = Counter()  # requests of former front ends, by id, until their last output
        self._call_ids = itertools.count()
        self._listener: Listener | None = None
        self._files = AdapterReceiver()
        self._alone_since: float | None = asyncio.get_running_loop().time()
        engine.on_message = self._from_engine

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
        while self._alone_since is None or loop.time() - self._alone_since < alone_s:
            await asyncio.sleep(alone_s / 20)
        log.warning("there has been no front end for %g s; this replica ends", alone_s)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._peer is not None:
            self._peer.transport.close()
        await self._files.close()
        self._engine.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    # -- the front end ------------------------------------------------------------------------------------------------

    def _admit(self, transport: MessageTransport, about: bytes, address: str) -> bytes:
        beat_s = beat_of(about)
        if self._peer is not None:
            log.warning("the front end at %s replaces the one at %s", address, self._peer.address)
            self._leave(self._peer)
        peer = self._peer = _Peer(transport, address)
        self._alone_since = None
        peer.watching = asyncio.create_task(self._watch(peer, beat_s), name="vlora-replica-beats")
        transport.on_message = lambda data: self._from_peer(peer, data)
        return messages.encode(self._ready)

    def _leave(self, peer: _Peer) -> None:
        """End a front end: nothing reads the answers of its requests."""
        peer.transport.close()
        if peer.watching is not None:
            peer.watching.cancel()
        if self._peer is peer:
            self._peer = None
            self._files.front_end_left()
            self._alone_since = asyncio.get_running_loop().time()
            self._ending += peer.unfinished
            for request_id in peer.unfinished:
                self._engine.send(messages.encode(messages.Cancel(request_id)))

    async def _watch(self, peer: _Peer, beat_s: float) -> None:
        """Notice the end of a front end, also if its connection stays open. Ping the engine while it is heard."""
        silence = Silence(lambda: peer.transport.num_bytes_received)
        missed = 0
        while missed < MISSED_BEATS:
            await asyncio.wait({peer.transport.closed}, timeout=beat_s)
            if peer.transport.closed.done():
                error = peer.transport.closed.exception()
                level = logging.INFO if error is None else logging.WARNING
                log.log(level, "the front end at %s is gone%s", peer.address, "" if error is None else f": {error}")
                break
            if not (missed := silence.beat()):
                self._engine.send(messages.PING)  # the front end's own pings may wait behind a large message
        else:
            log.warning("the front end at %s gave no sign of life for %g s", peer.address, missed * beat_s)
        peer.watching = None
        self._leave(peer)

    def _from_peer(self, peer: _Peer, data: bytes) -> None:
        """Pass a message on. An exception closes the connection, with the exception as its cause."""
        if data == messages.PING:
            self._engine.send(data)
            return
        message = messages.decode_to_engine(data)
        match message:
            case messages.Add():
                peer.unfinished[message.request.request_id] += 1
            case messages.Cancel() | messages.WatchLoad() | messages.Ping():
                pass
            case messages.Call(call_id, data_of_operation):
                operation = adapter_messages.decode_operation(data_of_operation)
                if isinstance(operation, FilesOperation):
                    self._files.receive(call_id, operation, peer.transport.send)
                    return
                # A reply to the front end before must not answer a call of this one.
                own_id = next(self._call_ids)
                peer.calls[own_id] = call_id
                data = messages.encode(messages.Call(own_id, operation))
            case _:
                raise ValueError(f"a front end may not send {type(message).__name__} to a replica")
        self._engine.send(data)

    def _from_engine(self, data: bytes) -> None:
        peer = self._peer
        message = messages.decode_from_engine(data)
        if isinstance(message, messages.Outputs) and self._ending:
            message = messages.Outputs(tuple(each for each in message.outputs if not self._is_of_former(each)))
            if not message.outputs:
                return
            data = messages.encode(message)
        if peer is None:
            return
        match message:
            case messages.Outputs():
                for each in message.outputs:
                    if each.finished:
                        _count_down(peer.unfinished, each.request_id)
            case messages.Reply():
                call_id = peer.calls.pop(message.call_id, None)
                if call_id is None:
                    return
                data = messages.encode(msgspec.structs.replace(message, call_id=call_id))
            case _:
                pass
        peer.transport.send(data)

    def _is_of_former(self, output: RequestOutput) -> bool:
        """Whether an output is of a former front end. The present one may use the same id: its outputs come later."""
        if output.request_id not in self._ending:
            return False
        if output.finished:
            _count_down(self._ending, output.request_id)
        return True


def _count_down(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]


class _Peer:
    """A front end.

    Attributes:
        unfinished: Its requests without a last output, by id; two if an id is used again after a cancellation.
        calls: Its own call ids by those that the engine sees.
    """

    def __init__(self, transport: MessageTransport, address: str) -> None:
        self.transport = transport
        self.address = address
        self.unfinished: Counter[str] = Counter()
        self.calls: dict[int, int] = {}
        self.watching: asyncio.Task[Any] | None = None


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
