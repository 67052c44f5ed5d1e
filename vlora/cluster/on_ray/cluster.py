"""`RayCluster`: replicas that are actors on a Ray, the user's or one that starts and ends with the cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.adapter_state import AdapterState
from vlora.cluster.autoscaler import Autoscaler
from vlora.cluster.cluster import Cluster
from vlora.cluster.journal_file import JournalFile
from vlora.cluster.members import Health, Member, alive, clients
from vlora.cluster.model_files import model_digest, portable
from vlora.cluster.on_ray.processes import LocalRay, RayProcesses, driver_settings
from vlora.cluster.on_ray.reports import (
    Connected,
    Draining,
    Failed,
    HeadFacts,
    Located,
    Logged,
    Lost,
    NoRoom,
    Restart,
    StandsBy,
    replica_names,
)
from vlora.cluster.on_ray.settings import Folder, RayOptions, with_own_cores, with_shared_cores
from vlora.cluster.replica import ALONE_S, ReplicaSettings
from vlora.cluster.status import with_place
from vlora.config import EngineConfig
from vlora.engine.host_resources import default_threads
from vlora.engine.ipc.client import ENGINE_COMMAND
from vlora.errors import BadConfig, BadRequest, EngineDead, VLoraError
from vlora.routing import Advice, RecordedRouter, Router
from vlora.routing.scaling import DOWN_AFTER_S, UP_AFTER_S, ScalingSettings
from vlora.types import EngineStats
from vlora.types.replicas import DOWN, DRAINING, SERVING, ClusterStatus, ReplicaStatus
from vlora.wire.address import Address

log = logging.getLogger("vlora.cluster")

HUNG_S = 60.0
MOVE_S = 10.0  # for the requests of a replica that leaves its node
_PAUSE_S = 0.2


class RayCluster(Cluster):
    """`EngineInterface` over replicas that are actors on Ray. Created by `start`.

    A replica that ends is started again. Without any, requests wait for a minute, then fail with the causes.

    Attributes:
        located: Where each replica is, as last reported, by name.
    """

    def __init__(
        self,
        config: EngineConfig,
        rule: str,
        health: Health | None,
        hung_s: float,
        scaling: ScalingSettings,
        automatic: bool,
        journal: JournalFile | None,
        adapters: AdapterState | None,
        shipping: ShippingLimits | None = None,
    ) -> None:
        settings: dict[str, Any] = {"rule": rule, "weights": config.weights, "tenant_weights": config.tenant_weights}
        router = Router(**settings) if journal is None else RecordedRouter(journal.write, **settings).as_router
        self.secret = secrets.token_bytes(32)
        super().__init__(router, self.secret, health=health, adapters=adapters, shipping=shipping)
        self._journal = journal
        self.folder = Folder.create()
        self.ray: RayProcesses
        self.number = self.num_replicas = scaling.least
        self.max_replicas = scaling.most
        self._closed = False
        self._hung_s = hung_s
        self._scaling = asyncio.Lock()
        self._num_calls = 0  # of `scale`
        self._failures: dict[str, str] = {}  # of the latest starts
        self._waiting: dict[str, str] = {}  # for room on a node of Ray, which may get one: that is no failure
        self._leaving: set[str] = set()  # drained by `scale`
        self._lost: dict[str, float] = {}  # since when replicas have been lost that have not joined again
        self.on_change: list[Callable[[], object]] = []
        self.located: dict[str, Located] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._moving: dict[str, asyncio.Task[None]] = {}
        self._starting: asyncio.Queue[str | StandsBy | NoRoom | Failed] | None = asyncio.Queue()  # of the start
        self._problem = ""  # of the driver, as last logged
        self._autoscaler = Autoscaler(self, scaling, self._loop.time, automatic=automatic)
        self._autoscaling: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        num_replicas: int,
        options: RayOptions = RayOptions(),  # noqa: B008
        *,
        max_replicas: int | None = None,
        autoscale: bool = False,
        scale_up_s: float = UP_AFTER_S,
        scale_down_s: float = DOWN_AFTER_S,
        journal: JournalFile | None = None,
        rule: str = "placed",
        adapters: AdapterState | None = None,
        shipping: ShippingLimits | None = None,
        model_name: str = "",
        announce: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = ENGINE_COMMAND,
        health: Health | None = None,
        alone_s: float = ALONE_S,
        hung_s: float = HUNG_S,
    ) -> RayCluster:
        """Start the replicas, on a new Ray of this machine unless the options have an address; wait until all serve.

        Args:
            max_replicas: The limit of `scale`; None: `num_replicas`.
            autoscale: Whether the load decides on their number, until an operator does.
            scale_up_s, scale_down_s: See `ScalingSettings`.
            journal: Records the router's calls; closed with the cluster.
            shipping: Limits of adapters' files, which are sent to nodes of the user's Ray that lack them.
            model_name: What others are told that uses the namespace.
            alone_s: A replica ends after so many seconds without a front end, if nothing has ended it before.
            hung_s: A lost replica is killed and started again if it has not joined after so many seconds.

        Raises:
            VLoraError: Ray cannot be used, or the first replica cannot be started; nothing is left running.
        """
        max_replicas = max(num_replicas, max_replicas or 0)
        is_local = options.address is None
        config = with_shared_cores(config, max_replicas) if is_local else with_own_cores(config, options.cpus)
        scaling = ScalingSettings(num_replicas, max_replicas, scale_up_s, scale_down_s)
        self = cls(config, rule, health, hung_s, scaling, autoscale, journal, adapters, None if is_local else shipping)
        local = LocalRay(self.folder, math.ceil(max_replicas * options.cpus)) if is_local else None
        replica = ReplicaSettings(
            config=dataclasses.replace(config, model=portable(config.model)),
            secret=self.secret,
            model_digest="" if is_local else await asyncio.to_thread(model_digest, config.model),
            command=("" if command[0] == sys.executable else command[0], *command[1:]),  # the Python of each node
            alone_s=alone_s,
        )
        settings = driver_settings(options, replica, num_replicas, max_replicas, self.folder, model_name)
        self.ray = RayProcesses(settings, local, self.hear)
        self._adapters.state.on_change = self.ray.keep
        try:
            if is_local and config.device == "cpu" and num_replicas > (cores := default_threads(environ={})):
                announce(f"{num_replicas} replicas share {cores} cores: more replicas than cores make a server slower")
            announce("starting Ray" if is_local else f"connecting to Ray at {options.address}")
            await self.ray.start()
            await self._wait_joined(num_replicas, announce, options.wait_s)
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
        return self.cause is not None  # they are started again without end

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
            limits = f"it must be between 1 and {self.max_replicas}, see --replicas"
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
        if not await self._emptied(last, ends_s, lambda: call == self._num_calls):
            return False
        self.num_replicas = number
        self.ray.scale(number)
        for name in last:
            await self._release(name)
        return True

    async def _emptied(self, names: Sequence[str], ends_s: float, goes_on: Callable[[], bool] = lambda: True) -> bool:
        """Wait until drained replicas have no requests. Returns whether they have none."""
        while any(map(self._has_requests, names)):
            if self._loop.time() >= ends_s or not goes_on():
                return False
            self.consolidate()
            await asyncio.sleep(_PAUSE_S / 4)
        return True

    async def _wait_started(self, number: int, ends_s: float) -> bool:
        call = self._num_calls
        while not set(replica_names(number)) <= set(clients(self.members)):
            if call != self._num_calls:
                return False
            if self._loop.time() > ends_s:
                if known := sorted({**self._waiting, **self._failures}.items()):
                    raise EngineDead(f"{known[0][0]} does not start: {known[0][1]}; it is tried again")
                return False
            await asyncio.sleep(_PAUSE_S)
        return True

    def status(self) -> ClusterStatus:
        """See `Cluster`, with the place of each replica, and why one does not start."""
        found = super().status()
        known = {each.name: each for each in found.replicas}
        for name in replica_names(self.num_replicas):
            known.setdefault(name, ReplicaStatus(name=name, state=DOWN, cause="it starts", num_requests=0))
        causes = {**self._waiting, **self._failures}
        replicas = tuple(with_place(each, self.located.get(name), causes) for name, each in sorted(known.items()))
        return msgspec.structs.replace(found, replicas=replicas, scaling=self._autoscaler.status)

    # -- of `Scaled` --------------------------------------------------------------------------------------------------

    @property
    def in_operation(self) -> bool:
        return self._scaling.locked()

    def absent(self) -> dict[int, str]:
        joined, names = clients(self.members), enumerate(replica_names(self.number))
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
        """See EngineInterface. Ends the replicas, and a Ray that was started here."""
        tasks = [*self._following.values(), *self._moving.values(), *([self._autoscaling] if self._autoscaling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()
        if not self._closed:
            self._closed = True
            await self.ray.close()
            self.folder.remove()
            if self._journal is not None:
                self._journal.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _wait_joined(self, number: int, announce: Callable[[str], None], wait_s: float) -> None:
        names, waiting = set[str](), dict[str, str]()
        ends_s: float | None = None  # once a replica has no room
        assert self._starting is not None
        while len(names) < number:
            try:
                async with asyncio.timeout_at(ends_s):
                    found = await self._starting.get()
            except TimeoutError:
                raise BadConfig(f"{next(iter(waiting.values()))}; nothing has changed for {wait_s:g} s") from None
            match found:
                case Failed(error=error):
                    raise error.to_exception()
                case StandsBy(service):
                    announce(f"{service} serves in this namespace; this one takes over when it ends")
                case NoRoom(name, ""):
                    waiting.pop(name, None)
                    ends_s = ends_s if waiting else None
                case NoRoom(name, what):
                    if not waiting:
                        announce(what)
                    waiting[name] = what
                    ends_s = ends_s or self._loop.time() + wait_s
                case name:
                    names.add(name)
                    where = "" if self.ray.local is not None else f" on {self.located[name].at.host}"
                    announce(f"{name} serves ({len(names)} of {number}){where}")
        self._starting = None

    async def _release(self, name: str) -> None:
        """Forget a replica that has no requests, and that the driver ends."""
        for task in filter(None, (self._following.pop(name, None), self._moving.pop(name, None))):
            task.cancel()
            await asyncio.wait({task})
        await self.remove(name)
        self._leaving.discard(name)
        for known in (self._failures, self._waiting, self._lost, self.located):
            known.pop(name, None)

    def hear(self, event: Any) -> None:
        """Follow an event of the driver."""
        name = getattr(event, "name", "")
        if name and name not in replica_names(self.num_replicas):
            return  # it was on its way when the number was reduced
        if self._starting is not None and isinstance(event, StandsBy | NoRoom | Failed):
            self._starting.put_nowait(event)
            return
        match event:
            case StandsBy(service):
                log.warning("%s has taken over; this server has no replicas until it ends", service)
                self._releasing = [asyncio.create_task(self._release(each)) for each in tuple(self.located)]
            case Connected():
                self._problem = ""
                self.secret = self._secret = event.secret
                if event.adapters is not None:
                    self._adapters.state.take_over(event.adapters)
                self.ray.keep(self.desired_adapters)
            case Located():
                self._failures.pop(name, None)
                self.located[name] = event
                if (task := self._following.get(name)) is None or task.done():
                    self._following[name] = asyncio.create_task(self._follow(name), name=f"vlora-follow-{name}")
            case Logged(lines=lines):
                for line in lines:
                    print(line if self.ray.local is not None else f"{name}: {line}", file=sys.stderr)
            case NoRoom(what=what):
                self._waiting.pop(name, None)
                if what:
                    self._waiting[name] = what
                    log.warning("%s", what)
            case Failed(error=error):
                if name:
                    self._failures[name] = error.message
                    log.warning("%s does not start: %s; retrying", name, error.message)
                elif self._problem != error.message:
                    self._problem = error.message
                    log.warning("%s; serving goes on, and it is tried again", error.message)
            case Lost(cause=cause):
                self._lost.pop(name, None)
                log.warning("%s has ended: %s; it is started again", name, cause)
            case Draining(node=node) if name not in self._moving:
                log.warning("Ray is going to end the node of %s, which moves to another one", name)
                self._moving[name] = asyncio.create_task(self._move(name, node), name=f"vlora-move-{name}")
            case HeadFacts() if event.warning:
                log.warning("%s", event.warning)

    async def _move(self, name: str, node: str) -> None:
        """Drain a replica, then have it started on another node."""
        resumes = name not in self._drained
        self._mark_drained(name, True)
        if len(clients(self.members)) > 1:
            await self._emptied([name], self._loop.time() + MOVE_S)
        await self._disconnect(name)  # requests that no other replica has room for continue anywhere
        asked_s = -math.inf
        while (found := self.located.get(name)) is not None and found.node == node:
            if self._loop.time() - asked_s > MOVE_S:  # another driver may have started
                asked_s = self._loop.time()
                self.ray.send(Restart(name, found.at.replica_pid, moves=True))
            await asyncio.sleep(_PAUSE_S)
        if resumes and name not in self._leaving:
            self._mark_drained(name, False)
        del self._moving[name]

    async def _follow(self, name: str) -> None:
        """Connect a replica, wherever its latest process listens."""
        while (found := self.located.get(name)) is not None:
            address = Address(found.at.host, found.at.port)
            if (member := self.members.get(name)) is not None and member.address == address:
                return  # or another driver has found it
            try:
                await self.replace(name, address, tls=found.at.tls)
            except VLoraError as error:
                log.warning("%s at %s cannot be used: %s; retrying", name, address, error)
                await asyncio.sleep(_PAUSE_S)

    def _left(self, member: Member, *, died: bool = True) -> None:
        super()._left(member, died=died)
        if died:
            self._lost[member.name] = self._loop.time()

    def _tick(self) -> None:
        """See `Cluster`. Ends lost replicas that have not joined again."""
        super()._tick()
        for name, since_s in self._lost.items():
            if self._loop.time() - since_s > self._hung_s:
                log.warning("%s has not joined again for %g s; it is started again", name, self._hung_s)
                self.ray.send(Restart(name, self.located[name].at.replica_pid))
                self._lost[name] = self._loop.time()

    def _joined(self, member: Member) -> None:
        self._lost.pop(member.name, None)
        was_absent = len(clients(self.members)) == 1
        super()._joined(member)
        if self._starting is not None:
            self._starting.put_nowait(member.name)
        if was_absent:
            for call in self.on_change:
                call()
