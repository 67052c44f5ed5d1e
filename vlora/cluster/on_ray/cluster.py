"""`RayCluster`: replicas that are actors on a Ray, the user's or one that starts and ends with the cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from vlora import operations as op
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.adapter_state import AdapterState
from vlora.cluster.autoscaler import Autoscaler
from vlora.cluster.journal_file import JournalFile
from vlora.cluster.members import Health, Member, clients
from vlora.cluster.model_files import model_digest, portable
from vlora.cluster.on_ray.front_ends import Change, FrontEnds, ServiceState
from vlora.cluster.on_ray.processes import LocalRay, RayProcesses, driver_settings
from vlora.cluster.on_ray.replicas import RayReplicas
from vlora.cluster.on_ray.reports import (
    Failed,
    Follows,
    Found,
    NoRoom,
    Owns,
    replica_names,
)
from vlora.cluster.on_ray.settings import Folder, RayOptions, with_cores
from vlora.cluster.replica import ALONE_S, ReplicaSettings
from vlora.config import EngineConfig
from vlora.engine.host_resources import default_threads
from vlora.engine.ipc.client import ENGINE_COMMAND
from vlora.engine.operations import LoadAdapter, RegisterAdapters
from vlora.errors import BadConfig, BadRequest, EngineDead, VLoraError
from vlora.operations import Operation
from vlora.routing import Advice, RecordedRouter, Router
from vlora.routing.scaling import DOWN_AFTER_S, UP_AFTER_S, ScalingSettings
from vlora.types import EngineStats, ErrorValue
from vlora.types.replicas import DRAINING, SERVING, ClusterStatus, ScalingStatus

log = logging.getLogger("vlora.cluster")

HUNG_S = 60.0
LINGER_S = 5.0  # for other front ends to ask for former contents of adapters
_PAUSE_S = 0.2


class RayCluster(RayReplicas):
    """`EngineInterface` over replicas that are actors on Ray, behind this front end and others. Created by `start`."""

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
        own: dict[str, Any] = {"health": health, "hung_s": hung_s, "adapters": adapters, "shipping": shipping}
        super().__init__(router, secrets.token_bytes(32), scaling.least, **own)
        self._journal = journal
        self.folder = Folder.create()
        self.number = scaling.least
        self.max_replicas = scaling.most
        self.on_change: list[Callable[[], object]] = []
        self._closed = False
        self._scaling = asyncio.Lock()
        self._num_calls = 0  # of `scale`
        self._starting: asyncio.Queue[str | Follows | NoRoom | Failed] | None = asyncio.Queue()  # of the start
        self._autoscaler = Autoscaler(self, scaling, self._loop.time, automatic=automatic)
        self.front_ends = FrontEnds(
            self.key, self._health, make_state=self._make_state, on_state=self._follow_owner, perform=self._perform
        )
        self._stated_s = 0.0  # when the owner's state came

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
        config = with_cores(config, max_replicas, None if is_local else options.cpus)
        scaling = ScalingSettings(num_replicas, max_replicas, scale_up_s, scale_down_s)
        self = cls(config, rule, health, hung_s, scaling, autoscale, journal, adapters, None if is_local else shipping)
        local = LocalRay(self.folder, math.ceil(max_replicas * options.cpus)) if is_local else None
        replica = ReplicaSettings(
            config=dataclasses.replace(config, model=portable(config.model)),
            secret=self._secret,
            model_digest="" if is_local else await asyncio.to_thread(model_digest, config.model),
            command=("" if command[0] == sys.executable else command[0], *command[1:]),  # the Python of each node
            alone_s=alone_s,
        )
        settings = driver_settings(options, replica, num_replicas, max_replicas, self.folder, model_name)
        self.ray = RayProcesses(settings, local, self.hear)
        try:
            if is_local and config.device == "cpu" and num_replicas > (cores := default_threads(environ={})):
                announce(f"{num_replicas} replicas share {cores} cores: more replicas than cores make a server slower")
            announce("starting Ray" if is_local else f"connecting to Ray at {options.address}")
            await self.ray.start()
            await self._wait_joined(num_replicas, announce, options.wait_s)
            self._begin(self._autoscaler.run())
        except BaseException:
            await self.close()
            raise
        return self

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
        """See Cluster, with what decides on the number of replicas."""
        return msgspec.structs.replace(super().status(), scaling=self._scaling_status)

    @property
    def makes_changes(self) -> bool:
        return self.front_ends.owner is None

    @property
    def _scaling_status(self) -> ScalingStatus:
        if self.front_ends.owner is None or (state := self.front_ends.state) is None:
            return self._autoscaler.status
        since_s = state.scaling.decided_s
        decided_s = None if since_s is None else since_s + self._loop.time() - self._stated_s
        return msgspec.structs.replace(state.scaling, decided_s=decided_s)

    async def call(self, operation: Operation) -> Any:
        """See Cluster. What the owner of the service does is left to it."""
        if self.front_ends.owner is not None and isinstance(operation, Change):
            return await self.front_ends.call(await self._with_contents(operation))
        match operation:
            case op.Scale(number, wait_s):
                found = await self.scale(number, wait_s)
            case _:
                found = await super().call(operation)
        if isinstance(operation, Change):  # the others have it before the caller hears of it
            self.front_ends.publish()
            await asyncio.sleep(0)
        return found

    async def _with_contents(self, change: Change) -> Change:
        """A change for the owner, after the replicas have the files, which may be on this machine only."""
        match change:
            case RegisterAdapters(paths):
                found = await self._adapters.offer(paths)
                versions = {name: each.version for name, each in found.items() if each.version}
                return RegisterAdapters({name: each.path for name, each in found.items()}, versions)
            case LoadAdapter(name, path):
                each = (await self._adapters.offer({name: path}))[name]
                return LoadAdapter(name, each.path, each.version)
        return change

    # -- of the autoscaler ---------------------------------------------------------------------------------------------

    @property
    def in_operation(self) -> bool:
        """Whether an operator's change is under way, or another front end makes the changes."""
        return self._scaling.locked() or self.front_ends.owner is not None

    def absent(self) -> dict[int, str]:
        """Of the first replicas, by their place, those that do not serve, with the error of their start, if known."""
        joined, names = clients(self.members), enumerate(replica_names(self.number))
        failures = {name: f"{name} does not start: {cause}" for name, cause in self._failures.items()}
        return {place: failures.get(name, "") for place, name in names if name not in joined}

    def serves(self, number: int) -> bool:
        """Whether all of the first replicas serve."""
        states = {each.name: each.state for each in super().status().replicas}
        return all(states.get(name) == SERVING for name in replica_names(number))

    def advice(self) -> Advice:
        return self._router.advice()

    def longest_wait_s(self) -> float:
        return self._in_flight.longest_wait_s

    async def advance(self, number: int) -> bool:
        """Start replicas, or drain and end the last ones, without waiting. Returns whether all is begun and ended."""
        async with self._scaling:
            self._check_remaining(number)
            return await self._reach(number, self._loop.time())

    async def stats(self) -> EngineStats:
        return msgspec.structs.replace(await super().stats(), num_restarts=self.events.num_deaths)

    async def close(self) -> None:
        """See EngineInterface. Ends the replicas, and a Ray that was started here."""
        tasks = [*self._following.values(), *self._moving.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.front_ends.publish()
        await asyncio.sleep(0)
        await self.front_ends.close()
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
        ends_s: float | None = None  # once a replica has no room, or one of another front end's has joined
        assert self._starting is not None
        while not names or not names >= {*self._wanted_at_start(number)}:
            try:
                async with asyncio.timeout_at(ends_s):
                    found = await self._starting.get()
            except TimeoutError:
                if not waiting:
                    announce(f"{len(names)} of {len(self.located)} replicas serve; the others are down")
                    break
                raise BadConfig(f"{next(iter(waiting.values()))}; nothing has changed for {wait_s:g} s") from None
            match found:
                case Failed(error=error):
                    raise error.to_exception()
                case Follows(service):
                    announce(f"{service} serves in this namespace; this one serves beside it")
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
                    if self.front_ends.owner is not None:  # which may have replicas that are down
                        ends_s = ends_s or self._loop.time() + wait_s
                    where = "" if self.ray.local is not None else f" on {self.located[name].at.host}"
                    announce(f"{name} serves ({len(names)} of {len(self._wanted_at_start(number))}){where}")
        self._starting = None

    def _wanted_at_start(self, number: int) -> Collection[str]:
        return replica_names(number) if self.front_ends.owner is None else self.located

    def hear(self, event: Any) -> None:
        """Follow an event of the driver."""
        if (name := getattr(event, "name", "")) and name not in replica_names(self.num_replicas):
            return  # it was on its way when the number was reduced
        if self._starting is not None and isinstance(event, Follows | NoRoom | Failed):
            self._starting.put_nowait(event)
        match event:
            case Found(address):
                self._begin(self._listen(address))
            case Owns(secret, term):
                self._own(secret, term)
            case Follows(service, secret):
                self._secret = secret
                self.front_ends.follow(service, secret)
            case NoRoom() | Failed() if self._starting is not None:
                pass
            case _:
                super().hear(event)

    # -- other front ends ---------------------------------------------------------------------------------------------

    async def _listen(self, address: str) -> None:
        try:
            self.ray.send(await self.front_ends.listen(address, self._secret))
        except VLoraError as error:
            self.hear(Failed("", ErrorValue.of(error)))

    def _own(self, secret: bytes, term: int) -> None:
        """Make the changes of the service, perhaps in place of another front end."""
        self._secret = secret
        state = self.front_ends.state if self.front_ends.owner is not None else None
        self.front_ends.own(secret)
        self._adapters.lead(term)
        if state is None:
            return
        log.warning("this front end makes the changes of the service from now on")
        kept = {*replica_names(state.number)}
        for name in state.leaving & kept:  # one of them that is still to leave its node is reported again
            self._mark_drained(name, False)
        for name in self.located.keys() - kept:  # the driver ends it
            self._begin(self._release(name))
        self._autoscaler.take_over(state.scaling)

    def _make_state(self) -> ServiceState:
        return ServiceState(
            number=self.number,
            located=dict(self.located),
            drained=frozenset(self._drained),
            leaving=frozenset({*self._leaving, *self._moving}),
            causes={**self._waiting, **self._failures},
            adapters=dict(self.desired_adapters),
            failures={name: home.mirrored() for name, home in self._adapters.homes.items()},
            scaling=self._autoscaler.status,
        )

    def _follow_owner(self, state: ServiceState) -> None:
        self._stated_s = self._loop.time()
        if state.number != self.number:
            self.ray.scale(state.number)  # for its driver, once it owns the service
        self.number = self.num_replicas = state.number
        for name in self._drained ^ state.drained:
            self._mark_drained(name, name in state.drained)
        self._waiting, self._failures = {}, dict(state.causes)
        for name in self.located.keys() - state.located.keys():
            self._begin(self._release(name))
        for name, found in state.located.items():
            if self.located.get(name) != found:
                self._locate(found)
        changes = state.adapters != self.desired_adapters
        self._adapters.follow(state.adapters, state.failures)
        if changes:
            self._tell_change()

    async def _perform(self, operation: Operation) -> Any:
        try:
            return await self.call(operation)
        finally:
            self._tell_change()

    def _tell_change(self) -> None:
        for call in self.on_change:
            call()

    def _tick(self) -> None:
        super()._tick()
        self._adapters.former.linger_s = LINGER_S if self.front_ends.num_followers else 0.0
        self.front_ends.publish()

    def _joined(self, member: Member) -> None:
        was_absent = len(clients(self.members)) == 1
        super()._joined(member)
        if self._starting is not None:
            self._starting.put_nowait(member.name)
        if was_absent:
            self._tell_change()
