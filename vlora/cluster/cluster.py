"""`Cluster`: many replicas behind `EngineInterface`. It has each request's tokens, so a replica's end loses none.

Requests, images and tokens go over connections to the replicas' engines (`connection.py`); the router decides which
replica gets which request, and `in_flight_requests.py` has the requests. The cluster belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from vlora.cluster.adapter_sender import AdapterSender, ShippingLimits
from vlora.cluster.adapter_state import AdapterState, DesiredAdapter
from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.in_flight_requests import InFlightRequests
from vlora.cluster.members import Health, Member, alive, clients
from vlora.cluster.status import Events, places_of, status_of
from vlora.cluster.summary import merged_stats
from vlora.engine.interface import EngineInterface, OutputStream
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.messages import LoadReport
from vlora.engine.operations import GetSnapshot, LoadAdapter, RegisterAdapters, Train
from vlora.errors import Aborted, BadRequest, EngineDead, UnknownReplica
from vlora.operations import (
    CancelTraining,
    DrainReplica,
    GetStats,
    ListTrainings,
    Operation,
    PinAdapter,
    ResumeReplica,
    Scale,
    UnloadAdapter,
)
from vlora.routing import MoveCosts, Report, Room, Router
from vlora.types import AdapterStatus, Request, RequestOutput
from vlora.types.replicas import SERVING, AdapterPlace, ClusterStatus
from vlora.wire.address import Address

log = logging.getLogger("vlora.cluster")

REPORT_S = 0.1  # between two reports of a replica
ABSENT_S = 60.0  # without any replica, before waiting requests fail
_TICK_S = 0.1


class Cluster(EngineInterface):
    """`EngineInterface` over the replicas of `add`."""

    def __init__(
        self,
        router: Router,
        secret: bytes,
        *,
        health: Health | None = None,
        absent_s: float = ABSENT_S,
        adapters: AdapterState | None = None,
        shipping: ShippingLimits | None = None,
    ) -> None:
        """Begin without replicas. Call in a running event loop.

        Args:
            secret: The shared secret, see `vlora.wire.handshake`.
            absent_s: How long requests wait while there is no replica.
            adapters: The desired adapters at first; the cluster closes it. None for an empty state without a file.
            shipping: Send adapters' files to replicas whose machines lack them, within limits; None: do not.
        """
        self.members: dict[str, Member] = {}
        self._router = router
        self._secret = secret
        self._health = health or Health()
        self._absent_s = absent_s
        self._adapters = ReplicatedAdapters(
            adapters or AdapterState(),
            unfinished=lambda: (
                (each.request.request_id, each.request.adapter) for each in self._in_flight.open.values()
            ),
            on_usable=self._adapter_usable,
            on_lack=self._adapter_lacking,
            on_drain=lambda name, version: self._in_flight.stay_with(name, version),
            sender=None if shipping is None else AdapterSender(shipping),
        )
        self.events = Events()
        self.key = secrets.token_hex(4)  # of this front end
        self._in_flight = InFlightRequests(router, self.events, self._client_of, self._adapters, self.key)
        self._placement = LivePlacement(router, asyncio.get_running_loop().time, self._in_flight.follow)
        self._in_flight.on_answered = self._placement.ended
        self._drained: set[str] = set()  # replicas, connected or not
        self._loop = asyncio.get_running_loop()
        self._absent_since: float | None = self._loop.time()
        self._cause: str | None = None
        self._ticking = asyncio.create_task(self._run(), name="vlora-cluster")

    # -- replicas -----------------------------------------------------------------------------------------------------

    def add(self, name: str, address: Address, *, tls: bool = False) -> None:
        """Have a replica: its connection is opened, and again after a loss, until `remove`. Its name must be new."""
        assert name not in self.members, name
        member = self.members[name] = Member(
            name,
            address,
            self._secret,
            key=self.key,
            tls=tls,
            health=self._health,
            prepare=self._prepare,
            on_join=self._joined,
            on_leave=self._left,
        )
        member.start()

    async def drain(self, name: str, timeout_s: float | None = None) -> bool:
        """Move a replica's requests to others, and send it no further ones, also after it was connected again.

        Where none has room, they wait with precedence over others, a few at a time. A request that no other replica
        could take ends there. After the timeout this goes on.

        Returns:
            Whether it has no requests left; False after the timeout.

        Raises:
            UnknownReplica: There is no such replica.
        """
        self._set_drained(name, True)
        return await self._emptied([name], None if timeout_s is None else self._loop.time() + timeout_s)

    def resume(self, name: str) -> None:
        """Send requests to a drained replica again. Raises UnknownReplica if there is none."""
        self._set_drained(name, False)

    async def remove(self, name: str) -> None:
        """Disconnect a replica; requests that it still has continue elsewhere. Unknown names are ignored."""
        self._drained.discard(name)
        await self.disconnect(name)

    def consolidate(self) -> int:
        """Move requests as the router decides: to replicas with room, or into its queue. Returns their number."""
        return self._in_flight.consolidate()

    def where(self, request_id: str) -> str | None:
        """The replica of an unfinished request; None while it waits for one."""
        return self._router.where(request_id)

    @property
    def num_unfinished(self) -> int:
        """Requests without their last output."""
        return len(self._in_flight.open)

    # -- EngineInterface ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        if self._cause is not None:
            raise EngineDead(self._cause)
        stream = OutputStream()
        in_flight = self._in_flight.add(request, stream.put)
        stream.end_at(until)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()
            self._in_flight.abandon(in_flight)

    async def cancel(self, request_id: str) -> None:
        self._in_flight.cancel(request_id)

    async def call(self, operation: Operation) -> Any:
        """See EngineInterface. A cluster does not train: replicas would train the same adapters in the same folder."""
        match operation:
            case RegisterAdapters(paths, versions):
                return await self._adapters.register(paths, versions)
            case LoadAdapter(name, path, version):
                return await self._adapters.load(name, path, version)
            case UnloadAdapter(name, drain):
                return await self._adapters.unload(name, drain)
            case PinAdapter(name, pinned):
                return await self._adapters.pin(name, pinned)
            case DrainReplica(name, wait_s):
                others = [each.name for each in self.status().replicas if each.name != name and each.state == SERVING]
                if name in self.members and not others:
                    raise BadRequest(
                        f"no other replica than {name!r} serves; resume another one before this one is drained"
                    )
                return await self.drain(name, wait_s)
            case ResumeReplica(name):
                return self.resume(name)
            case Scale():
                raise BadRequest(
                    "the replicas of this server were not started by it; their number cannot be changed here"
                )
            case Train(plan):
                raise BadRequest(
                    f"a cluster does not train; serve {plan} with `vlora serve --train` on one of its machines"
                )
            case ListTrainings():
                return ()
            case CancelTraining(name):
                raise BadRequest(f"no training named {name[:128]!r} is running; a cluster does not train")
            case GetStats():  # the sums; requests that wait for a replica are waiting ones
                found = await asyncio.gather(*(client.stats() for client in alive(self.members).values()))
                return merged_stats(found, num_waiting=self._router.num_waiting)
            case GetSnapshot():  # of the first replica by name
                return await next(iter(alive(self.members).values())).call(operation)
            case _:
                raise BadRequest(f"a cluster does not perform {type(operation).__name__}")

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        """See EngineInterface. An adapter is resident if any replica has it on its device."""
        return await self._adapters.statuses()

    @property
    def desired_adapters(self) -> dict[str, DesiredAdapter]:
        return self._adapters.state.adapters

    async def adapter_places(self) -> tuple[AdapterPlace, ...]:
        return await places_of(self._adapters, self.members)

    def status(self) -> ClusterStatus:
        """The replicas, the queue, and what happened so far."""
        return status_of(self.members, self._router, self.events, self._adapters)

    async def close(self) -> None:
        """See EngineInterface. The replicas' processes go on."""
        self._cause = "the cluster was closed"
        self._ticking.cancel()
        self._in_flight.fail_all(Aborted("the cluster was closed"), "cancelled")
        await asyncio.gather(*(member.close() for member in self.members.values()))
        self.members.clear()
        await self._adapters.close()

    # -- members ------------------------------------------------------------------------------------------------------

    async def disconnect(self, name: str) -> None:
        member = self.members.pop(name, None)
        if member is None:
            return
        try:
            await asyncio.shield(member.close())  # also if the caller is cancelled
        finally:
            self._adapters.leave(name)
            if name in self._router.replicas:
                self._left(member, died=False)

    async def _prepare(self, member: Member, client: EngineClient) -> None:
        await self._adapters.join(member.name, client)

    def _joined(self, member: Member) -> None:
        client = member.client
        assert client is not None
        self._absent_since = self._cause = None
        ready = client.ready
        self._in_flight.block_size = ready.block_size
        client.watch_load(REPORT_S, lambda report: self._reported(member, client, report))
        room = Room(max_batch_size=ready.max_batch_size, blocks=ready.num_blocks)
        # Requests are sent once the router knows what the replica cannot serve.
        self._in_flight.send(self._router.join(member.name, room, draining=True))
        self._adapters.joined(member.name)
        if member.name not in self._drained:
            self._in_flight.send(self._router.drain(member.name, False))
        self._in_flight.submit_lacking()
        self._placement.replicas_changed()

    def _set_drained(self, name: str, drained: bool) -> None:
        if name not in self.members:
            raise UnknownReplica(
                f"there is no replica {name!r}; the replicas are {', '.join(sorted(self.members)) or 'none'}"
            )
        self._mark_drained(name, drained)

    def _mark_drained(self, name: str, drained: bool) -> None:
        """As `_set_drained`, also for a replica that is not connected."""
        (self._drained.add if drained else self._drained.discard)(name)
        if name in self._router.replicas:
            self._in_flight.send(self._router.drain(name, drained))

    def _has_requests(self, name: str) -> bool:
        """Whether a replica has requests, of other front ends too as far as its last report says."""
        replica = self._router.replicas.get(name)
        return self._in_flight.is_on(name) or (replica is not None and replica.size > 0)

    def _reported(self, member: Member, client: EngineClient, report: LoadReport) -> None:
        if member.client is not client:
            return
        load = report.load
        self._in_flight.versions |= load.resident
        self._adapters.seen(member.name, load.resident)
        found = Report(
            free_blocks=load.free_blocks,
            taken=report.num_taken,
            ended=report.num_ended,
            num_requests=load.num_running + load.num_waiting,
            num_sharing=report.num_sharing,
            adapters=frozenset((*load.resident, *load.loading)),
        )
        self._in_flight.send(self._router.report(member.name, found))

    def _left(self, member: Member, *, died: bool = True) -> None:
        if not clients(self.members):
            self._absent_since = self._loop.time()
        self.events.num_deaths += died
        self._adapters.leave(member.name)
        self._in_flight.replica_left(member.name, member.cause, died=died)
        self._placement.replicas_changed()

    async def _emptied(
        self, names: Sequence[str], ends_s: float | None, goes_on: Callable[[], bool] = lambda: True
    ) -> bool:
        """Wait until drained replicas have no requests. Returns whether they have none."""
        while any(map(self._has_requests, names)):
            if (ends_s is not None and self._loop.time() >= ends_s) or not goes_on():
                return False
            self.consolidate()
            await asyncio.sleep(_TICK_S / 4)
        return True

    def _client_of(self, name: str | None) -> EngineClient | None:
        member = None if name is None else self.members.get(name)
        return None if member is None else member.client

    def _adapter_usable(self, replica: str, adapter: str, usable: bool) -> None:
        if replica in self._router.replicas:
            self._in_flight.send(self._router.bar(replica, adapter, not usable))

    def _adapter_lacking(self, replica: str, adapter: str, version: str, lacks: bool) -> None:
        if replica in self._router.replicas:
            self._in_flight.send(self._router.lack(replica, adapter, version, lacks))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._tick()
            except Exception:  # requests and deadlines of the next round depend on it
                log.exception("a round of the cluster failed; the next one follows")

    def _tick(self) -> None:
        """Refuse what cannot be served, and place adapters and requests."""
        self._in_flight.refuse(some_absent=len(clients(self.members)) < len(self.members))
        if any(replica.draining and replica.holds for replica in self._router.replicas.values()):
            self.consolidate()
        self._placement.tick()
        since = self._absent_since
        if since is not None and self._loop.time() - since > self._absent_s and self._cause is None:
            try:
                alive(self.members)
            except EngineDead as error:
                self._cause = str(error)
                self._in_flight.fail_all(error)


REPLAN_S, REBALANCE_S = 60.0, 10.0
COSTS = MoveCosts(load_s=0.5, again_s=0.1)
"""Of a move, as assumed in the simulations of docs/decisions/0076; not measured on a cluster."""


class LivePlacement:
    """Calls the router's placement at intervals, and after replicas have joined or left.

    Planned homes move nothing by themselves: they decide where a further copy of an adapter goes (`PlacedAdapters`).
    """

    def __init__(self, router: Router, clock: Callable[[], float], follow: Callable[[str], None]) -> None:
        """Begin without replicas."""
        self._router = router
        self._clock = clock
        self._follow = follow
        self._replan_s = self._rebalance_s = 0.0  # when each is due
        self._looked_s = clock()
        self._busy_s = 0.0  # of all replicas, and the requests that have ended; recent ones count most
        self._num_ended = 0.0

    def replicas_changed(self) -> None:
        """A replica has joined or left: plan with the next `tick`."""
        self._replan_s = self._rebalance_s = self._clock()

    def ended(self) -> None:
        self._num_ended += 1

    def tick(self) -> None:
        """To be called every 100 ms or so."""
        now = self._clock()
        replicas = self._router.replicas.values()
        self._busy_s += (now - self._looked_s) * sum(bool(replica.holds) for replica in replicas)
        self._looked_s = now
        if now >= self._replan_s:
            self._replan_s = now + REPLAN_S
            self._router.replan()
        if now >= self._rebalance_s and self._num_ended:
            self._rebalance_s = now + REBALANCE_S
            if self._some_wait_needlessly():
                for move in self._router.rebalance(self._busy_s / self._num_ended, COSTS):
                    self._follow(move.request_id)
            self._busy_s /= 2
            self._num_ended /= 2

    def _some_wait_needlessly(self) -> bool:
        """Whether one replica has more requests than its batch, and another one fewer: only then is a move worth it."""
        serving = [replica for replica in self._router.replicas.values() if not replica.draining]
        return any(replica.size > replica.room.max_batch_size for replica in serving) and any(
            replica.size < replica.room.max_batch_size for replica in serving
        )
