"""`LocalCluster`: replicas on a Ray of this machine, which starts and ends with the cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.adapter_state import AdapterState
from vlora.cluster.autoscaler import Autoscaler
from vlora.cluster.cluster import Cluster
from vlora.cluster.journal_file import JournalFile
from vlora.cluster.members import Health, Member, alive, clients
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.actor import ActorSettings
from vlora.cluster.on_ray.log_pipe import LogPipe
from vlora.cluster.on_ray.own_processes import end_all, kill_replica
from vlora.cluster.on_ray.processes import RayProcesses, RayStart
from vlora.cluster.on_ray.reports import Failed, Located, replica_names
from vlora.cluster.on_ray.settings import Folder, replica_environment
from vlora.cluster.replica import ALONE_S
from vlora.config import EngineConfig
from vlora.engine.host_resources import default_threads
from vlora.engine.ipc.client import ENGINE_COMMAND
from vlora.errors import BadRequest, EngineDead, VLoraError
from vlora.routing import Advice, RecordedRouter, Router
from vlora.routing.scaling import DOWN_AFTER_S, UP_AFTER_S, ScalingSettings
from vlora.types import EngineStats
from vlora.types.replicas import DRAINING, SERVING, ClusterStatus
from vlora.wire.address import Address

log = logging.getLogger("vlora.cluster")

HUNG_S = 60.0
_PAUSE_S = 0.2


class Pids(NamedTuple):
    """The processes of one replica. Only the replica and its engine are needed to serve."""

    actor: int
    replica: int
    engine: int


def with_shared_cores(config: EngineConfig, num_replicas: int) -> EngineConfig:
    """The configuration of each of several engines on this machine: without `threads`, they divide the cores."""
    if config.threads is not None:
        return config
    return dataclasses.replace(config, threads=default_threads(config.tensor_parallel * num_replicas))


class LocalCluster(Cluster):
    """`EngineInterface` over replicas of this machine. Created by `start`.

    A replica that ends is started again. Without any, requests wait for a minute, then fail with the causes.

    Attributes:
        tls: Whether the replicas have certificates.
    """

    tls = False

    def __init__(
        self,
        config: EngineConfig,
        rule: str,
        folder: Folder,
        health: Health | None,
        hung_s: float,
        num_replicas: int,
        scaling: ScalingSettings,
        automatic: bool,
        journal: JournalFile | None,
        adapters: AdapterState | None,
        shipping: ShippingLimits | None = None,
    ) -> None:
        settings: dict[str, Any] = {"rule": rule, "weights": config.weights, "tenant_weights": config.tenant_weights}
        router = Router(**settings) if journal is None else RecordedRouter(journal.write, **settings).as_router
        super().__init__(router, folder.secret(), health=health, adapters=adapters, shipping=shipping)
        self._journal = journal
        self.folder = folder
        self._log = LogPipe(folder.log_pipe)
        self.ray: RayProcesses
        self.num_replicas, self.max_replicas = num_replicas, scaling.most
        self.number = num_replicas
        self._closed = False
        self._hung_s = hung_s
        self._scaling = asyncio.Lock()
        self._num_calls = 0  # of `scale`
        self._failures: dict[str, str] = {}  # of the latest starts
        self._leaving: set[str] = set()  # drained by `scale`
        self._hung: dict[str, asyncio.TimerHandle] = {}  # by the names of lost replicas
        self.pids: dict[str, Pids] = {}
        self.on_change: list[Callable[[], object]] = []
        self._addresses: dict[str, Address] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._starting: asyncio.Queue[str | VLoraError] | None = asyncio.Queue()  # names and errors of the start
        self._autoscaler = Autoscaler(self, scaling, self._loop.time, automatic=automatic)
        self._autoscaling: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        num_replicas: int,
        *,
        max_replicas: int | None = None,
        autoscale: bool = False,
        scale_up_s: float = UP_AFTER_S,
        scale_down_s: float = DOWN_AFTER_S,
        journal: JournalFile | None = None,
        rule: str = "placed",
        adapters: AdapterState | None = None,
        announce: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = ENGINE_COMMAND,
        health: Health | None = None,
        alone_s: float = ALONE_S,
        hung_s: float = HUNG_S,
    ) -> LocalCluster:
        """Start Ray and the replicas, and wait until all serve.

        Args:
            config: Of each replica. Without `threads`, as many as there may be share the cores.
            max_replicas: The limit of `scale`; None: `num_replicas`.
            autoscale: Whether the load decides on their number, until an operator does.
            scale_up_s, scale_down_s: See `ScalingSettings`.
            journal: Records the router's calls; closed with the cluster.
            alone_s: A replica ends after so many seconds without a front end, if nothing has ended it before.
            hung_s: A lost replica is killed, and so started again, if it has not joined after so many seconds.

        Raises:
            VLoraError: Ray or the first replica cannot be started; nothing is left running.
        """
        max_replicas = max(num_replicas, max_replicas or 0)
        config = with_shared_cores(config, max_replicas)
        folder = Folder.create()
        try:
            scaling = ScalingSettings(num_replicas, max_replicas, scale_up_s, scale_down_s)
            self = cls(config, rule, folder, health, hung_s, num_replicas, scaling, autoscale, journal, adapters)
        except BaseException:
            folder.remove()
            raise
        num_gpus = 0 if config.device == "cpu" else config.tensor_parallel
        actors = {
            name: ActorSettings(
                config=config,
                secret_file=folder.secret_file,
                lock_file=folder.lock_file(name),
                log_pipe=folder.log_pipe,
                command=tuple(command),
                environ=replica_environment(folder, os.environ, place=place, num_gpus=num_gpus),
                alone_s=alone_s,
            )
            for place, name in enumerate(replica_names(max_replicas))
        }

        async def prepare() -> RayStart:
            ports = ray_settings.find_ports(max_replicas)
            environ = ray_settings.environment(folder, os.environ)
            command = ray_settings.start_command(folder, ports)
            connection = ray_settings.connection(folder, f"{ray_settings.LOOPBACK}:{ports.control}")
            return RayStart(ports, command, environ, connection)

        self.ray = RayProcesses(folder, prepare, actors, num_replicas, self._hear, num_gpus=num_gpus)
        try:
            announce("starting Ray")
            await self.ray.start()
            ports = self.ray.ports
            announce(f"Ray listens on ports {ports} of all addresses of this machine, with a token of its own")
            await self._wait_joined(num_replicas, announce)
            self._autoscaling = asyncio.create_task(self._autoscaler.run(), name="vlora-autoscaler")
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def cause(self) -> str | None:
        """Why no replica can be used; None while one can."""
        try:
            alive(self.members)
        except EngineDead as error:
            return str(error)
        return None

    @property
    def starting(self) -> bool:
        """Whether no replica can be used. They are started again without end."""
        return self.cause is not None

    async def scale(self, number: int | Literal["auto"], timeout_s: float) -> bool:
        """Have another number of replicas: start further ones, or drain the last ones and then end them.

        This turns automatic scaling off; "auto" turns it on. A later call ends the wait of an earlier one.

        Returns:
            Whether it is done. After the timeout, starts go on, and what drains is ended by a later call only.

        Raises:
            BadRequest: The number is not between 1 and `max_replicas`, or none of those that would remain serves.
            EngineDead: A replica does not start.
        """
        if number == "auto":
            self._num_calls += 1
            self._autoscaler.turn_on()
            return True
        if not 1 <= number <= self.max_replicas:
            limits = f"it must be between 1 and {self.max_replicas}, see --max-replicas"
            raise BadRequest(f"the number of replicas is {number}; {limits}")
        ends_s = self._loop.time() + timeout_s
        self._num_calls = call = self._num_calls + 1
        async with self._scaling:
            if call != self._num_calls:
                return False
            self._check_remaining(number)
            self._autoscaler.set_by_operator(number)
            return await self._reach(number, ends_s) and await self._wait_started(number, ends_s)

    def _check_remaining(self, number: int) -> None:
        """Raises BadRequest if none of the first replicas serves, or will serve once it is no longer drained."""
        ends, names = number < self.num_replicas, replica_names(number)
        if ends and not any(
            each.name in names and (each.state == SERVING or (each.state == DRAINING and each.name in self._leaving))
            for each in self.status().replicas
        ):
            raise BadRequest(f"none of the {number} replicas that would remain serves; resume one first")

    async def _reach(self, number: int, ends_s: float) -> bool:
        """Start the first replicas, drain and end the others. Returns whether the latter is done."""
        self.number, call = number, self._num_calls
        names, last = replica_names(number), replica_names(self.num_replicas)[number:]
        for name in self._leaving & set(names):
            self._leaving.discard(name)
            self._mark_drained(name, False)
        for name in last:
            self._leaving.add(name)
            self._mark_drained(name, True)
        while any(map(self._has_requests, last)):
            if self._loop.time() >= ends_s or call != self._num_calls:
                return False
            self.consolidate()
            await asyncio.sleep(_PAUSE_S / 4)
        self.num_replicas = number
        self.ray.scale(number)
        for name in last:
            await self._release(name)
        return True

    async def _wait_started(self, number: int, ends_s: float) -> bool:
        call = self._num_calls
        while not set(replica_names(number)) <= set(clients(self.members)):
            if call != self._num_calls:
                return False
            if self._loop.time() > ends_s:
                for name in sorted(self._failures):
                    raise EngineDead(f"{name} does not start: {self._failures[name]}; it is tried again")
                return False
            await asyncio.sleep(_PAUSE_S)
        return True

    def status(self) -> ClusterStatus:
        return msgspec.structs.replace(super().status(), scaling=self._autoscaler.status)

    # -- of `Scaled` --------------------------------------------------------------------------------------------------

    @property
    def in_operation(self) -> bool:
        return self._scaling.locked()

    def absent(self) -> dict[int, str]:
        joined = clients(self.members)
        names = enumerate(replica_names(self.number))
        failures = {name: f"{name} does not start: {cause}" for name, cause in self._failures.items()}
        return {place: failures.get(name, "") for place, name in names if name not in joined}

    def serves(self, number: int) -> bool:
        states = {each.name: each.state for each in super().status().replicas}
        return all(states.get(name) == SERVING for name in replica_names(number))

    def advice(self) -> Advice:
        return self._router.advice()

    def longest_wait_s(self) -> float:
        return self._in_flight.longest_wait_s

    async def advance(self, number: int) -> bool:
        async with self._scaling:
            self._check_remaining(number)
            return await self._reach(number, self._loop.time())

    async def stats(self) -> EngineStats:
        return msgspec.structs.replace(await super().stats(), num_restarts=self.events.num_deaths)

    async def close(self) -> None:
        """See EngineInterface. Ends the replicas and Ray."""
        for timer in self._hung.values():
            timer.cancel()
        tasks = [*self._following.values(), *([self._autoscaling] if self._autoscaling else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await super().close()
        if not self._closed:
            self._closed = True
            await self.ray.close()
            # Without a head, as between two of them, nothing else has ended the replicas.
            await asyncio.to_thread(end_all, self.folder)
            self._log.close()
            self.folder.remove()
            if self._journal is not None:
                self._journal.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _wait_joined(self, number: int, announce: Callable[[str], None]) -> None:
        names: set[str] = set()
        assert self._starting is not None
        while len(names) < number:
            found = await self._starting.get()
            if isinstance(found, VLoraError):
                raise found
            names.add(found)
            announce(f"{found} serves ({len(names)} of {number})")
        self._starting = None

    async def _release(self, name: str) -> None:
        """End the process of a replica that has no requests."""
        if (following := self._following.pop(name, None)) is not None:
            following.cancel()
            await asyncio.wait({following})
        await self.remove(name)
        self._cancel_kill(name)
        self._leaving.discard(name)
        self._failures.pop(name, None)
        self._changed.pop(name, None)
        if (pids := self.pids.pop(name, None)) is not None:
            self._end_processes(name, pids)

    def _end_processes(self, name: str, pids: Pids) -> None:
        """Kill a replica's processes. It is started again, if it is still one of those that there are."""
        kill_replica(self.folder, (pids.replica, pids.engine))

    def _hear(self, event: Any) -> None:
        match event:
            case Located(name=name) | Failed(name=name) if name and name not in replica_names(self.num_replicas):
                pass  # it was on its way when the number was reduced
            case Located(name=name, at=at):
                replica = at.replica
                self._failures.pop(name, None)
                self.pids[name] = Pids(at.pid, replica.pid, replica.engine_pid)
                self._addresses[name] = Address(replica.host, replica.port)
                if name not in self._changed:
                    self._changed[name] = asyncio.Event()
                    self._following[name] = asyncio.create_task(self._follow(name), name=f"vlora-follow-{name}")
                self._changed[name].set()
            case Failed(name=name, error=error):
                if self._starting is not None:
                    self._starting.put_nowait(error.to_exception())
                else:
                    if self._failures.get(name) != error.message:
                        log.warning("%s does not start: %s; retrying", name or "no replica", error.message)
                    self._failures[name] = error.message
            case lost:
                log.warning("the actor of %s has ended: %s; it is started again", lost.name, lost.cause)

    async def _follow(self, name: str) -> None:
        """Connect a replica, wherever its latest process listens."""
        changed = self._changed[name]
        while True:
            await changed.wait()
            changed.clear()
            address = self._addresses[name]
            member = self.members.get(name)
            if member is not None and member.address == address:
                continue  # found by another driver or actor
            try:
                await self.replace(name, address, tls=self.tls)
            except VLoraError as error:
                log.warning("%s at %s cannot be used: %s; retrying", name, address, error)
                await asyncio.sleep(_PAUSE_S)
                changed.set()

    def _left(self, member: Member, *, died: bool = True) -> None:
        super()._left(member, died=died)
        if died and (pids := self.pids.get(member.name)) is not None:
            self._cancel_kill(member.name)
            self._hung[member.name] = self._loop.call_later(self._hung_s, self._kill, member, pids)

    def _kill(self, member: Member, pids: Pids) -> None:
        """End a replica that was lost and has not joined again, unless it was replaced."""
        if self.members.get(member.name) is member and member.client is None:
            log.warning("%s has not joined again for %g s; it is started again", member.name, self._hung_s)
            self._end_processes(member.name, pids)

    def _cancel_kill(self, name: str) -> None:
        if (timer := self._hung.pop(name, None)) is not None:
            timer.cancel()

    def _joined(self, member: Member) -> None:
        self._cancel_kill(member.name)
        was_absent = len(clients(self.members)) == 1
        super()._joined(member)
        if self._starting is not None:
            self._starting.put_nowait(member.name)
        if was_absent:
            for call in self.on_change:
                call()
