"""`Cluster`: many replicas behind `EngineInterface`. It has each request's tokens, so a replica's end loses none.

Requests, images and tokens go over lines to the replicas' engines (`door.py`); the router decides which replica gets
which request. The cluster belongs to one event loop. All changes of a request's state are made by callbacks of that
loop, without a task for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Mapping

from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.door import Address
from vlora.cluster.flight import Flight
from vlora.cluster.members import Health, Member, alive, clients
from vlora.cluster.prefix_keys import prefix_keys
from vlora.cluster.status import ClusterStatus, Events, status_of
from vlora.cluster.summary import merged_stats
from vlora.cluster.suspects import Suspects
from vlora.engine.ipc.client import EngineClient
from vlora.engine.snapshot import EngineLoad, EngineSnapshot
from vlora.errors import (
    Aborted,
    BadAdapter,
    BadRequest,
    EngineDead,
    StepFailed,
    UnknownAdapter,
    VLoraError,
)
from vlora.routing import Need, Placed, Report, Room, Router
from vlora.types import AdapterStatus, EngineStats, ErrorValue, Request, RequestOutput

log = logging.getLogger("vlora.cluster")

REPORT_S = 0.1  # between two reports of a replica
MOVE_S = 0.25  # for the last tokens of a replica from which a request is moved
MAX_DEATHS = 3  # of replicas under a request, before it counts as the cause
ABSENT_S = 60.0  # without any replica, before waiting requests fail
_TICK_S = 0.1
_NO_HOME = (BadAdapter.code, UnknownAdapter.code)


class Cluster:
    """`EngineInterface` over replicas that `add` connects.

    A request that was on a replica twice when it died is suspected to be the cause: of the suspects one at a time runs,
    and the third death ends it with StepFailed, so it takes no other requests along.
    """

    def __init__(
        self, router: Router, secret: bytes, *, health: Health | None = None, absent_s: float = ABSENT_S
    ) -> None:
        """Begin without replicas. Call in a running event loop.

        Args:
            router: Decides which replica gets which request.
            secret: The shared secret, see `handshake`.
            health: When a replica counts as dead.
            absent_s: How long requests wait while there is no replica.
        """
        self.members: dict[str, Member] = {}
        self.flights: dict[str, Flight] = {}
        self._router = router
        self._secret = secret
        self._health = health or Health()
        self._absent_s = absent_s
        self._adapters = ReplicatedAdapters(lambda: clients(self.members))
        self._needs: dict[str, Need] = {}  # of unfinished requests
        self._arrivals = itertools.count()
        self._suspects = Suspects()
        self.events = Events()
        self._versions: dict[str, str] = {}  # content hashes of adapters, as last reported
        self._block_size = 1
        self._loop = asyncio.get_running_loop()
        self._absent_since: float | None = self._loop.time()
        self._cause: str | None = None
        self._ticking = asyncio.create_task(self._tick(), name="vlora-cluster")

    # -- replicas -----------------------------------------------------------------------------------------------------

    async def add(self, name: str, address: Address, *, tls: bool = False) -> None:
        """Connect a replica; after a loss its line is opened again until `remove`.

        Raises:
            BadConfig: The name is in use, or the versions differ.
            VLoraError: As `connect`, or an adapter cannot be registered there.
        """
        member = self._member(name, address, tls)
        self.members[name] = member
        try:
            await member.join()
        except BaseException:
            del self.members[name]
            raise

    async def drain(self, name: str, timeout_s: float | None = None) -> bool:
        """Move a replica's requests to others, and send it no further ones. Those without room elsewhere end there.

        Returns:
            Whether it has no requests left; False after the timeout.
        """
        self._fly(self._router.drain(name))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(name in (flight.replica, flight.target) for flight in self.flights.values()):
                    self.consolidate()
                    await asyncio.sleep(_TICK_S / 4)
                return True
        return False

    def resume(self, name: str) -> None:
        """Send requests to a drained replica again."""
        self._fly(self._router.drain(name, False))

    async def remove(self, name: str) -> None:
        """Disconnect a replica; requests that it still has continue elsewhere. Unknown names are ignored."""
        member = self.members.pop(name, None)
        if member is None:
            return
        was_joined = member.client is not None
        await member.close()
        if was_joined:
            self._left(member, died=False)

    def consolidate(self) -> int:
        """Move requests as the router decides. Returns their number."""
        moves = self._router.consolidate()
        for move in moves:
            self._move(self.flights[move.request_id], move.target)
        return len(moves)

    # -- EngineInterface ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        """See EngineInterface."""
        if self._cause is not None:
            raise EngineDead(self._cause)
        if request.request_id in self.flights:
            raise BadRequest(f"request id {request.request_id!r} is already in use; ids must be unique")
        stream: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        flight = self.flights[request.request_id] = Flight(request, stream.put_nowait, self._loop.time)
        late = None if until is None else self._loop.call_at(until, stream.put_nowait, None)
        finished = False
        try:
            self._submit(flight)
            while not finished:
                output = await stream.get()
                if output is None:
                    raise TimeoutError
                finished = output.finished
                yield output
        finally:
            if late is not None:
                late.cancel()
            self._forget(flight)

    async def cancel(self, request_id: str) -> None:
        """See EngineInterface."""
        flight = self.flights.get(request_id)
        if flight is None:
            return
        flight.cancelled = True
        client = self._client(flight.replica)
        if client is None:
            self._fail(flight, _cancelled(flight), "cancelled")
        else:
            client.post_cancel(flight.attempt_id)

    async def register_adapters(self, paths: Mapping[str, str]) -> None:
        """See EngineInterface."""
        await self._adapters.register(paths)
        self._unbar(paths)

    async def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """See EngineInterface."""
        status = await self._adapters.load(name, path)
        self._unbar((name,))
        return status

    async def unload_adapter(self, name: str, drain: bool = False) -> None:
        """See EngineInterface."""
        await self._adapters.unload(name, drain)

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """See EngineInterface."""
        return await self._adapters.pin(name, pinned)

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        """See EngineInterface. An adapter is resident if any replica has it on its device."""
        return await self._adapters.statuses()

    async def stats(self) -> EngineStats:
        """See EngineInterface. The sums over the replicas; requests that wait for a replica are waiting ones."""
        found = await asyncio.gather(*(client.stats() for client in alive(self.members).values()))
        return merged_stats(found, num_waiting=self._router.num_waiting)

    async def snapshot(self, since: int = 0) -> EngineSnapshot:
        """See EngineInterface. That of the first replica by name."""
        return await next(iter(alive(self.members).values())).snapshot(since)

    def status(self) -> ClusterStatus:
        """The replicas, the queue, and what happened so far."""
        return status_of(self.members, self._router, self.events)

    async def close(self) -> None:
        """See EngineInterface. The replicas' processes go on."""
        self._cause = "the cluster was closed"
        self._ticking.cancel()
        for flight in tuple(self.flights.values()):
            self._fail(flight, Aborted("the cluster was closed"), "cancelled")
        await asyncio.gather(*(member.close() for member in self.members.values()))
        self.members.clear()

    # -- members ------------------------------------------------------------------------------------------------------

    def _member(self, name: str, address: Address, tls: bool) -> Member:
        if name in self.members:
            raise BadRequest(f"a replica named {name!r} is already in the cluster; names must be unique")
        return Member(
            name,
            address,
            self._secret,
            tls=tls,
            health=self._health,
            prepare=lambda member, client: self._adapters.restore(client),
            on_join=self._joined,
            on_leave=self._left,
        )

    def _joined(self, member: Member) -> None:
        client = member.client
        assert client is not None
        self._absent_since = self._cause = None
        ready = client.ready
        self._block_size = ready.block_size
        client.watch_load(REPORT_S, lambda load, taken: self._reported(member, client, load, taken))
        room = Room(max_batch_size=ready.max_batch_size, blocks=ready.num_blocks)
        self._fly(self._router.join(member.name, room))

    def _reported(self, member: Member, client: EngineClient, load: EngineLoad, taken: int) -> None:
        if member.client is not client:
            return
        self._versions |= load.resident
        report = Report(
            free_blocks=load.free_blocks,
            taken=taken,
            ended=taken - load.num_running - load.num_waiting,
            adapters=frozenset((*load.resident, *load.loading)),
        )
        self._fly(self._router.report(member.name, report))

    def _left(self, member: Member, *, died: bool = True) -> None:
        """Resubmit the requests of a replica that has died or was removed."""
        if not clients(self.members):
            self._absent_since = self._loop.time()
        self.events.num_deaths += died
        for need in self._router.leave(member.name):
            flight = self.flights.get(need.request_id)
            if flight is None:
                continue
            self.events.num_resubmitted += died
            was_there = died and flight.replica == member.name
            flight.num_deaths += was_there
            self._detach(flight)
            flight.leave(None)
            if flight.cancelled:
                self._fail(flight, _cancelled(flight), "cancelled")
            elif flight.num_deaths >= MAX_DEATHS:
                cause = f"{flight.num_deaths} replicas died while they computed this request"
                self._fail(flight, StepFailed(f"{cause}, the last one: {member.cause}"))
            elif flight.num_deaths < MAX_DEATHS - 1 or self._suspects.add(need.request_id):
                self._submit(flight)

    async def _tick(self) -> None:
        """Refuse what cannot be served, regularly."""
        while True:
            await asyncio.sleep(_TICK_S)
            refused = self._router.refuse(self._loop.time())
            for refusal in refused.refusals:
                flight = self.flights.get(refusal.need.request_id)
                if flight is not None:
                    self._fail(flight, flight.refused(refusal.reason))
            self._fly(refused.placed)
            since = self._absent_since
            if since is not None and self._loop.time() - since > self._absent_s and self._cause is None:
                try:
                    alive(self.members)
                except EngineDead as error:
                    self._cause = str(error)
                    for flight in tuple(self.flights.values()):
                        self._fail(flight, error)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _need(self, flight: Flight) -> Need:
        request = flight.request
        first_s = [bound for bound in (request.max_ttft_s, request.max_latency_s) if bound is not None]
        old = self._needs.get(request.request_id)
        need = self._needs[request.request_id] = Need(
            request_id=request.request_id,
            adapter=request.adapter,
            blocks=self._blocks(flight),
            arrival=next(self._arrivals) if old is None else old.arrival,
            priority=request.priority,
            tenant=request.tenant,
            answer_by=flight.began_s + min(first_s) if first_s and not flight.tokens else None,
            returned=old is not None,
            prefix=self._prefix(request) if old is None else old.prefix,
        )
        return need

    def _prefix(self, request: Request) -> tuple[bytes, ...]:
        adapter = request.adapter or ""
        return prefix_keys(request, f"{adapter}@{self._versions.get(adapter, '')}", self._block_size)

    def _blocks(self, flight: Flight) -> int:
        return (len(flight.request.prompt_ids) + len(flight.tokens)) // self._block_size + 1

    def _submit(self, flight: Flight) -> None:
        self._fly(self._router.submit(self._need(flight)))

    def _fly(self, placed: Iterable[Placed]) -> None:
        for need, name in [(place.need, place.replica) for place in placed]:
            flight = self.flights.get(need.request_id)
            if flight is not None:
                self._start(flight, name)

    def _start(self, flight: Flight, name: str) -> None:
        """Begin an attempt on a replica."""
        client = self._client(name)
        if client is None or client.cause is not None:
            return  # the replica has died, and `_left` follows
        request = flight.begin(name)
        if request is None:
            return  # its time has passed
        attempt_id = request.request_id
        try:
            client.submit(request, lambda output: self._receive(flight, attempt_id, output))
        except BadRequest as error:
            self._fail(flight, error)

    def _receive(self, flight: Flight, attempt_id: str, output: RequestOutput) -> None:
        if flight.attempt_id != attempt_id or flight.request.request_id not in self.flights:
            return  # of an earlier attempt
        code = None if output.error is None else output.error.code
        if code == EngineDead.code:
            if flight.target is not None:
                flight.num_deaths += 1
                self._go_on(flight, None)
            return  # otherwise `_left` follows
        if flight.target is not None and output.finish_reason == "cancelled" and not flight.cancelled:
            self._go_on(flight, output)
            return
        if code in _NO_HOME and flight.request.adapter in self._adapters and self._has_other(flight):
            self._try_elsewhere(flight, output)
            return
        before = self._blocks(flight)
        flight.receive(output)
        if (blocks := self._blocks(flight)) != before:
            self._router.grew(flight.request.request_id, blocks)

    def _fail(self, flight: Flight, error: VLoraError, reason: str = "error") -> None:
        self._detach(flight)
        flight.fail(ErrorValue.of(error), reason)

    def _forget(self, flight: Flight) -> None:
        """The caller has the last output, or has left."""
        request_id = flight.request.request_id
        self._detach(flight)
        del self.flights[request_id]
        self._needs.pop(request_id, None)
        placed = self._router.ended(request_id)
        self._fly(placed)
        if (following := self._suspects.remove(request_id)) is not None:
            self._submit(self.flights[following])

    def _detach(self, flight: Flight) -> None:
        """Cancel the current attempt; nothing of it is expected any more."""
        client = self._client(flight.replica)
        if client is not None:
            client.abandon(flight.attempt_id)

    def _client(self, name: str | None) -> EngineClient | None:
        member = None if name is None else self.members.get(name)
        return None if member is None else member.client

    # -- moves --------------------------------------------------------------------------------------------------------

    def _move(self, flight: Flight, target: str) -> None:
        """Continue a request on another replica: computed again there, after the tokens that it has answered."""
        if flight.target is not None:
            flight.target = target  # it has not left the first replica yet
            return
        client = self._client(flight.replica)
        flight.target = target
        flight.num_moves += 1
        self.events.num_moves += 1
        if client is None:
            return  # `_left` or the last output of its replica follows
        attempt_id = flight.attempt_id
        client.post_cancel(attempt_id)
        self._loop.call_later(MOVE_S, self._stop_waiting, flight, attempt_id)

    def _stop_waiting(self, flight: Flight, attempt_id: str) -> None:
        if flight.attempt_id == attempt_id and flight.target is not None:
            self._go_on(flight, None)

    def _go_on(self, flight: Flight, last: RequestOutput | None) -> None:
        """Leave a replica for the target of a move."""
        target = flight.target
        assert target is not None
        self._detach(flight)
        flight.leave(last)
        if flight.cancelled:
            self._fail(flight, _cancelled(flight), "cancelled")
        elif flight.request.request_id in self.flights:
            self._start(flight, target)

    def _has_other(self, flight: Flight) -> bool:
        return any(name != flight.replica for name in clients(self.members))

    def _unbar(self, adapters: Iterable[str]) -> None:
        """Replicas may have these adapters from now on."""
        for name in clients(self.members):
            for adapter in adapters:
                self._fly(self._router.bar(name, adapter, False))

    def _try_elsewhere(self, flight: Flight, output: RequestOutput) -> None:
        """A replica cannot load the request's adapter: others may have its files."""
        request_id, name, adapter = flight.request.request_id, flight.replica, flight.request.adapter
        assert name is not None and adapter is not None and output.error is not None
        log.warning("replica %r is no home for adapter %r: %s", name, adapter, output.error.message)
        flight.refusal = output.error
        flight.leave(output)
        placed = [*self._router.bar(name, adapter), *self._router.ended(request_id)]
        self._fly(placed)
        self._submit(flight)


def _cancelled(flight: Flight) -> Aborted:
    return Aborted(f"request {flight.request.request_id!r} was cancelled")
