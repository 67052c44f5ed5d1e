"""Replicas without processes, sockets and real time: for many random schedules of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from tests.cluster.running import SECRET, SLEEPING, joined
from tests.cluster.sleeping_engine import SleepingEngine, version_of
from tests.routing.integrity import check_integrity
from tests.virtual_clock import VirtualClockLoop
from vlora.cluster import members
from vlora.cluster.cluster import Cluster
from vlora.cluster.members import Health
from vlora.cluster.peers import Peer, Peers
from vlora.engine import operations
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.messages import LoadReporter
from vlora.engine.ipc.worker import OutputCoalescer
from vlora.errors import BadAdapter, BadRequest, Disconnected, VLoraError
from vlora.operations import GetStats, Operation, PinAdapter, UnloadAdapter
from vlora.routing import Router
from vlora.types import AdapterStatus, ErrorValue, Request, RequestOutput
from vlora.wire.address import Address

P = ParamSpec("P")
T = TypeVar("T")

STEP_S = 0.02
V1, V2, V3 = (version_of(text) for text in "123")
"""The contents of the adapter `x`."""
HEALTH = Health(beat_s=0.1, missed=4)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(asyncio.wait_for(main, 3600))


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtually(test(*args, **kwargs))

    return run


class _Died(Exception):
    """A request has killed the engine."""


class FaultyEngine(SleepingEngine):
    """Its files differ, and it may refuse pins. It serves any composition, unless a file is broken.

    faults: The text of an adapter's file by name, empty without one; for "pin NAME" and a composition the reason why
        that is refused.
    """

    def __init__(self, faults: dict[str, str]) -> None:
        super().__init__(SLEEPING)
        self._step_s = 0.0
        self.clock = asyncio.get_running_loop().time
        self._faults = faults

    def die(self) -> None:
        raise _Died

    def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        if pinned and f"pin {name}" in self._faults:
            raise BadRequest(self._faults[f"pin {name}"])
        return super().pin_adapter(name, pinned)

    def _version_for(self, name: str, wanted: str | None) -> str:
        if "+" not in name:
            return super()._version_for(name, wanted)
        if name in self._faults:
            raise BadAdapter(self._faults[name])
        return version_of(name)

    def text_of(self, name: str, path: str) -> str | None:
        return self._faults[name] or None if name in self._faults else super().text_of(name, path)


class LocalReplica:
    """An engine that steps in the event loop.

    Attributes:
        hung: It neither steps nor reads nor answers, as after SIGSTOP. What it is sent is kept.
        opens_lines: Also while it hangs, as a process of which only the engine hangs.
        alive: False: it refuses connections, as a process that has ended.
        num_reports: Of its load, so far.
        faults: See FaultyEngine. They outlive a restart.
        call_s: How long a call about adapters takes.
        calls: About adapters, since the start.
        num_requests: That it was sent, those that it has refused included.
    """

    def __init__(self, max_batch_size: int = 8) -> None:
        """max_batch_size: as the cluster knows it; the engine's own is 8."""
        self.max_batch_size = max_batch_size
        self.faults: dict[str, str] = {}
        self.call_s = 0.0
        self.calls: list[Operation] = []
        self.num_requests = 0
        self.alive = self.hung = self.opens_lines = False
        self.num_reports = 0
        self._lines: dict[str, _Line] = {}  # by the keys of front ends
        self._kept: list[tuple[_Line, bytes]] = []
        self.start()

    def start(self) -> None:
        """Start the process, again after `kill`."""
        if not self.alive:
            self.engine = FaultyEngine(self.faults)
            self.calls = []
            self._peers = Peers(self._take)
            clock = asyncio.get_running_loop().time
            self._coalescer = OutputCoalescer(clock, self.engine.version_of)
            self._reports = LoadReporter(self.engine.load, self._report, clock)
            self.alive, self.hung = True, False
            self._asked = asyncio.Event()
            self._stepping = asyncio.create_task(self._step())

    def kill(self) -> None:
        self.alive = False
        self._stepping.cancel()
        self._kept.clear()
        while self._lines:
            self._lines.popitem()[1].end()

    def cut(self) -> None:
        """End the lines. The engine lives on."""
        for line in tuple(self._lines.values()):
            line.close()

    def wake(self) -> None:
        """Read what was sent in the meantime, and go on."""
        self.hung = False
        kept, self._kept = self._kept, []
        for line, data in kept:
            self._receive(line, data)

    async def connect(self, key: str) -> EngineClient:
        if not self.alive:
            raise Disconnected("the process has ended")
        while self.hung and not self.opens_lines:
            await asyncio.sleep(STEP_S)
        self._drop(self._lines.get(key))
        line = self._lines[key] = _Line(key, self._receive)
        self._peers.present[key] = Peer(line.deliver)
        return EngineClient(line, line, messages.Ready("", 1, 10_000, self.max_batch_size, 16, 1000))  # type: ignore[arg-type]

    def _drop(self, line: _Line | None) -> None:
        """As a replica's process does with a lost front end."""
        if line is not None and line is self._lines.get(line.key):
            del self._lines[line.key]
            line.end()
            self._peers.leave(line.key)

    def _receive(self, line: _Line, data: bytes | None) -> None:
        if self.hung:
            if data is not None:
                self._kept.append((line, data))
        elif data is None or line is not self._lines.get(line.key):
            self._drop(line)
        else:
            self._peers.from_peer(self._peers.present[line.key], data)

    def _take(self, data: bytes) -> None:
        """As the engine's process does with a message."""
        outputs: tuple[RequestOutput, ...] = ()
        match message := messages.decode_to_engine(data):
            case messages.Add():
                self._asked.set()
                self._reports.count_request()
                outputs = self._add(message.request)
            case messages.Cancel():
                output = self.engine.cancel(message.request_id)
                outputs = () if output is None else (output,)
            case messages.Ping():
                self._send(messages.Pong(0.0))
            case messages.WatchLoad():
                self._reports.watch(message.every_s)
            case _:
                assert isinstance(message, messages.Call), message
                outputs = self._call(message.call_id, messages.decode_operation(message.operation))
        self._send_outputs(outputs)
        self._reports.poll()

    def _add(self, request: Request) -> tuple[RequestOutput, ...]:
        self.num_requests += 1
        try:
            self.engine.add(request)
        except VLoraError as error:
            refused = RequestOutput(request_id=request.request_id, finish_reason="error", error=ErrorValue.of(error))
            return (refused,)
        self._coalescer.add(request)
        return ()

    def _call(self, call_id: int, operation: Operation) -> tuple[RequestOutput, ...]:
        """Answer a call about adapters, after `call_s`. Returns outputs of requests."""
        found: Any = None
        engine, outputs, error = self.engine, tuple[RequestOutput, ...](), None
        try:
            match operation:
                case UnloadAdapter(name, drain):
                    outputs = engine.unload_adapter(name, drain)
                case GetStats():
                    found = engine.stats()
                case operations.ListAdapters(after):
                    found = engine.adapters(after)
                case operations.RegisterAdapters(paths, versions):
                    engine.register_adapters(paths, versions)
                case operations.LoadAdapter(name, path, version):
                    found = engine.load_adapter(name, path, version)
                case operations.KeepAdapters(versions):
                    found = engine.keep_adapters(versions)
                case PinAdapter(name, pinned):
                    found = engine.pin_adapter(name, pinned)
                case other:
                    raise AssertionError(other)
        except VLoraError as refused:
            error = ErrorValue.of(refused)
        self.calls.append(operation)
        reply = messages.Reply(call_id, found, error)
        asyncio.get_running_loop().call_later(self.call_s, self._reply, self._peers, reply)
        return outputs

    def _reply(self, peers: Peers, reply: messages.Reply[Any]) -> None:
        if peers is self._peers and self.alive:
            self._send(reply)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if not self.hung:
                if not self.engine.has_work:  # it looks less often, so that hours pass quickly
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(4 * STEP_S):
                            await self._asked.wait()
                    self._asked.clear()
                try:
                    self._send_outputs(self.engine.step() if self.engine.has_work else ())
                except _Died:
                    self.kill()
                    return
                self._reports.poll()

    def _report(self, report: messages.LoadReport) -> None:
        self.num_reports += 1
        self._send(report)

    def _send_outputs(self, outputs: tuple[RequestOutput, ...]) -> None:
        if outputs := self._coalescer.coalesce(outputs):
            self._send(messages.Outputs(outputs))

    def _send(self, message: messages.FromEngine) -> None:
        self._peers.from_engine(messages.encode(message))


class _Line:
    """Both the transport and the process of an `EngineClient`."""

    def __init__(self, key: str, receive: Callable[[_Line, bytes | None], None]) -> None:
        self.key = key
        self.on_message: Callable[[bytes], object] = lambda data: None
        self.num_bytes_received = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._sent, self._answered = deque[bytes](), deque[bytes]()  # of two timers at once, either may be the first

    def send(self, data: bytes) -> None:
        if not self.closed.done():
            self._sent.append(data)
            asyncio.get_running_loop().call_later(0.0005, lambda: self._receive(self, self._sent.popleft()))

    def deliver(self, data: bytes) -> None:
        self._answered.append(data)
        asyncio.get_running_loop().call_later(0.0005, self._arrive)

    def _arrive(self) -> None:
        data = self._answered.popleft()
        if not self.closed.done():
            self.num_bytes_received += len(data)
            self.on_message(data)

    def close(self) -> None:
        self.end()
        self._receive(self, None)

    def end(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    async def wait(self) -> None:
        await asyncio.wait({self.closed})


def connecting(replicas: dict[int, LocalReplica]) -> Callable[..., Coroutine[Any, Any, EngineClient]]:
    """In place of `connection.connect`. replicas: by port."""

    async def connect(address: Address, *_: Any, key: str, **__: Any) -> EngineClient:
        try:
            async with asyncio.timeout(0.5):
                return await replicas[address.port].connect(key)
        except TimeoutError as error:
            raise Disconnected("it did not answer") from error

    return connect


def at(name: str) -> Address:
    return Address("127.0.0.1", ord(name))


class Here:
    """A cluster of replicas `a`, `b`, ... The folder has files with three contents of an adapter `x`."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, names: str, cluster: Cluster, router: Router) -> None:
        self.cluster, self.router = cluster, router
        self.replicas = {name: LocalReplica() for name in names}
        self.ports = {ord(name): replica for name, replica in self.replicas.items()}
        patch.setattr(members, "connect", connecting(self.ports))
        self.paths = {text: str(folder / text) for text in "123"}
        for text, path in self.paths.items():
            Path(path).write_text(text)

    async def add(self, name: str, replica: LocalReplica | None = None) -> None:
        """Add a replica to the cluster. replica: if it does not exist yet."""
        if replica is not None:
            self.ports[ord(name)] = self.replicas[name] = replica
        await joined(self.cluster, name, at(name))

    def where(self, request_id: str) -> str:
        name = self.router.where(request_id)
        assert name is not None
        return name

    async def restart(self, name: str) -> None:
        """Let a replica die, and come back."""
        self.replicas[name].kill()
        await asyncio.sleep(0.1)
        self.replicas[name].start()
        await self.cluster.members[name].wait_joined()

    async def all_joined(self) -> None:
        await asyncio.gather(*(member.wait_joined() for member in self.cluster.members.values()))

    async def load(self, text: str) -> None:
        assert (await self.cluster.load_adapter("x", self.paths[text])).version == version_of(text)

    async def move_all(self) -> None:
        for name in tuple(self.router.replicas):
            await self.cluster.drain(name, 0.4)
            self.cluster.resume(name)

    def contents(self) -> set[str]:
        """The versions of `x` on the replicas; empty where it is missing."""
        found = [replica.engine.adapters() for replica in self.replicas.values() if replica.alive]
        return {next((status.version for status in own if status.name == "x"), "") for own in found}

    async def check_idle(self) -> None:
        """Nothing of requests and of former contents is left."""
        await asyncio.sleep(1.0)
        check_integrity(self.router)
        assert not (self.cluster.num_unfinished or self.router.num_waiting)
        assert not any(replica.lacks or replica.holds for replica in self.router.replicas.values())
        alive = [replica.engine for replica in self.replicas.values() if replica.alive]
        assert not any(engine.kept or engine.has_work for engine in alive)


class Maker:
    """Makes clusters in virtual time; see the fixture `cluster`."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = patch, folder

    @contextlib.asynccontextmanager
    async def __call__(
        self,
        names: str = "ab",
        rule: str = "placed",
        *,
        over: float = 4.0,
        health: Health | None = None,
        kind: type[Cluster] = Cluster,
        router: Router | None = None,
        **settings: Any,
    ) -> AsyncIterator[Here]:
        """The replicas are in the cluster for the block, and end after it."""
        router = router or Router(rule, over=over)
        cluster = kind(router, SECRET, absent_s=60.0, health=health, **settings)
        here = Here(self.patch, self.folder, names, cluster, router)
        try:
            for name in names:
                await here.add(name)
            yield here
        finally:
            await cluster.close()
            for replica in here.replicas.values():
                replica.kill()
