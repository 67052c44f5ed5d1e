"""Replicas that are actors on Ray: where each is, and what follows when one leaves its node, is lost, or comes back."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec

from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.adapter_state import AdapterState
from vlora.cluster.cluster import Cluster
from vlora.cluster.members import Health, Member, alive, clients
from vlora.cluster.on_ray.processes import RayProcesses
from vlora.cluster.on_ray.reports import (
    Draining,
    Failed,
    HeadFacts,
    Located,
    Logged,
    Lost,
    NoRoom,
    Restart,
    replica_names,
)
from vlora.cluster.status import with_place
from vlora.errors import EngineDead
from vlora.routing import Router
from vlora.types.replicas import DOWN, ClusterStatus, ReplicaStatus
from vlora.wire.address import Address

log = logging.getLogger("vlora.cluster")

MOVE_S = 10.0  # for the requests of a replica that leaves its node
_PAUSE_S = 0.2


class RayReplicas(Cluster):
    """`EngineInterface` over replicas of which a driver reports.

    A replica that ends is started again. Without any, requests wait for a minute, then fail with the causes.

    Attributes:
        located: Where each replica is, as last reported, by name.
        num_replicas: Those that there are to be, and those that drain in order to end.
    """

    ray: RayProcesses

    def __init__(
        self,
        router: Router,
        secret: bytes,
        number: int,
        *,
        health: Health | None,
        hung_s: float,
        adapters: AdapterState | None,
        shipping: ShippingLimits | None,
    ) -> None:
        super().__init__(router, secret, health=health, adapters=adapters, shipping=shipping)
        self.num_replicas = number
        self.located: dict[str, Located] = {}
        self._hung_s = hung_s
        self._failures: dict[str, str] = {}  # of the latest starts
        self._waiting: dict[str, str] = {}  # for room on a node of Ray, which may get one: that is no failure
        self._leaving: set[str] = set()  # drained by `scale`
        self._lost: dict[str, float] = {}  # since when replicas have been lost that have not joined again
        self._following: dict[str, asyncio.Task[None]] = {}
        self._moving: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._problem = ""  # of the driver, as last logged

    @property
    def makes_changes(self) -> bool:
        """Whether no other front end does."""
        return True

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

    def status(self) -> ClusterStatus:
        """See Cluster, with the place of each replica, and why one does not start."""
        found = super().status()
        known = {each.name: each for each in found.replicas}
        for name in replica_names(self.num_replicas):
            known.setdefault(name, ReplicaStatus(name=name, state=DOWN, cause="it starts", num_requests=0))
        causes = {**self._waiting, **self._failures}
        replicas = tuple(with_place(each, self.located.get(name), causes) for name, each in sorted(known.items()))
        return msgspec.structs.replace(found, replicas=replicas)

    def hear(self, event: Any) -> None:
        """Follow an event of the driver about a replica, or about Ray."""
        name = getattr(event, "name", "")
        match event:
            case Located():
                self._failures.pop(name, None)
                self._locate(event)
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

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, name: str) -> None:
        """Forget a replica that has no requests, and that the driver ends."""
        for task in filter(None, (self._following.pop(name, None), self._moving.pop(name, None))):
            task.cancel()
            await asyncio.wait({task})
        await self.remove(name)
        self._leaving.discard(name)
        for known in (self._failures, self._waiting, self._lost, self.located):
            known.pop(name, None)

    def _locate(self, found: Located) -> None:
        self.located[found.name] = found
        if (task := self._following.get(found.name)) is None or task.done():
            self._following[found.name] = asyncio.create_task(self._follow(found.name))

    async def _move(self, name: str, node: str) -> None:
        """Drain a replica, then have it started on another node."""
        resumes = name not in self._drained
        self._mark_drained(name, True)
        if len(clients(self.members)) > 1:
            await self._emptied([name], self._loop.time() + MOVE_S)
        await self.disconnect(name)  # requests that no other replica has room for continue anywhere
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
            await self.disconnect(name)
            if name not in self.members:
                self.add(name, address, tls=found.at.tls)

    def _left(self, member: Member, *, died: bool = True) -> None:
        super()._left(member, died=died)
        if died:
            self._lost[member.name] = self._loop.time()

    def _tick(self) -> None:
        """See `Cluster`. Ends lost replicas that have not joined again."""
        super()._tick()
        for name, since_s in self._lost.items():
            if self.makes_changes and self._loop.time() - since_s > self._hung_s:
                log.warning("%s has not joined again for %g s; it is started again", name, self._hung_s)
                self.ray.send(Restart(name, self.located[name].at.replica_pid))
                self._lost[name] = self._loop.time()

    def _joined(self, member: Member) -> None:
        self._lost.pop(member.name, None)
        super()._joined(member)
