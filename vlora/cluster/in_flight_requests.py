"""The unfinished requests of a cluster: on which replica each is, and what follows when it moves, ends or loses it.

All changes are made by callbacks of one event loop, without a task for each request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable

from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.held_requests import HeldRequests
from vlora.cluster.in_flight_request import InFlightRequest, prefix_keys
from vlora.cluster.status import Events
from vlora.engine.ipc.client import EngineClient
from vlora.errors import (
    Aborted,
    AdapterChanged,
    BadAdapter,
    BadRequest,
    EngineDead,
    StepFailed,
    UnknownAdapter,
    VLoraError,
)
from vlora.routing import Need, Placed, Router
from vlora.types import ErrorValue, Request, RequestOutput

log = logging.getLogger("vlora.cluster")

MOVE_S = 0.25  # for the last tokens of a replica from which a request is moved
MAX_DEATHS = 3  # of replicas under a request, before it counts as the cause
_NO_CONTENT = (BadAdapter.code, UnknownAdapter.code, AdapterChanged.code)


class InFlightRequests:
    """The requests by id, each until its last output.

    A request that was on a replica twice when it died is suspected to be the cause: of the suspects one at a time runs,
    and the third death ends it with StepFailed, so it takes no other requests along.

    Attributes:
        versions: Content hashes of adapters, as last reported.
        on_answered: Called when a replica has answered a request.
    """

    def __init__(
        self,
        router: Router,
        events: Events,
        client_of: Callable[[str | None], EngineClient | None],
        adapters: ReplicatedAdapters,
        key: str,
    ) -> None:
        """Begin without requests. Call in a running event loop.

        Args:
            client_of: The engine of a replica; None without a connection to it.
            key: Of this front end.
        """
        self.open: dict[str, InFlightRequest] = {}
        self.block_size = 1
        self.versions: dict[str, str] = {}
        self.on_answered: Callable[[], None] = lambda: None
        self._router = router
        self._events = events
        self._client_of = client_of
        self._adapters = adapters
        self._needs: dict[str, Need] = {}
        self._arrivals = itertools.count()
        self._key, self._attempts = key, itertools.count(1)
        self._suspects: list[str] = []  # ids in order; the first one runs, so a further death finds the cause
        self._placed: deque[str] = deque()  # requests that `send` has still to follow
        self._is_sending = False
        self._loop = asyncio.get_running_loop()
        self._held = HeldRequests(router, adapters, self._loop.time)

    # -- callers ------------------------------------------------------------------------------------------------------

    def add(self, request: Request, deliver: Callable[[RequestOutput], None]) -> InFlightRequest:
        """Begin a request. `deliver` is called with each output.

        Raises:
            BadRequest: Its id is in use.
        """
        if request.request_id in self.open:
            raise BadRequest(f"request id {request.request_id!r} is already in use; ids must be unique")
        in_flight = self.open[request.request_id] = InFlightRequest(request, deliver, self._loop.time)
        self._submit(in_flight)
        return in_flight

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its last output follows. Unknown ids are ignored."""
        in_flight = self.open.get(request_id)
        if in_flight is None:
            return
        in_flight.cancelled = True
        client = self._client_of(in_flight.replica)
        if client is None:
            self._fail(in_flight, _cancelled(in_flight), "cancelled")
        else:
            client.post_cancel(in_flight.attempt_id)

    def abandon(self, in_flight: InFlightRequest) -> None:
        """The caller has left, perhaps before the last output."""
        if self._is_open(in_flight):
            self._detach(in_flight)
            self._end(in_flight)

    def fail_all(self, error: VLoraError, reason: str = "error") -> None:
        for in_flight in tuple(self.open.values()):
            self._fail(in_flight, error, reason)

    # -- replicas -----------------------------------------------------------------------------------------------------

    def send(self, placed: Iterable[Placed]) -> None:
        """Send requests to replicas, as the router has decided.

        A request that ends here makes room for others. They are left to the outermost call, as any number may end.
        """
        self._placed.extend(place.need.request_id for place in placed)
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while self._placed:
                self.follow(self._placed.popleft())
        finally:
            self._is_sending = False

    def follow(self, request_id: str) -> None:
        """Continue a request where the router has it: on its replica, on another one, or waiting.

        A request may end here, so that the router places others, and those are followed too. Therefore nothing is
        remembered of a decision: each call, in any order and number, looks at the router's latest one. A request that
        has ended is ignored.
        """
        in_flight = self.open.get(request_id)
        if in_flight is None or in_flight.leaving:  # `_go_on` follows
            return
        name = self._router.where(request_id)
        if in_flight.replica is not None:
            if in_flight.replica != name:
                self._leave_replica(in_flight)
        elif name is not None:
            self._start(in_flight, name)

    def consolidate(self) -> int:
        """Move requests as the router decides: to replicas with room, or into its queue. Returns their number."""
        if self._router.num_waiting:
            recalled = self._router.recall()
            moved = [need.request_id for need in recalled.needs]
            others = [place.need.request_id for place in recalled.placed]
        else:
            moved, others = [move.request_id for move in self._router.consolidate()], []
        for request_id in (*moved, *others):
            self.follow(request_id)
        return len(moved)

    def is_on(self, name: str) -> bool:
        """Whether a replica has requests, or will have those that leave another one for it."""
        return any(name in (in_flight.replica, self._router.where(key)) for key, in_flight in self.open.items())

    def replica_left(self, name: str, cause: str, *, died: bool) -> None:
        """Continue the requests of a replica elsewhere. died: it has died under them."""
        for need in self._router.leave(name):
            in_flight = self.open.get(need.request_id)
            if in_flight is None:
                continue
            self._events.num_resubmitted += died
            in_flight.num_deaths += died and in_flight.replica == name
            self._detach(in_flight)
            in_flight.leave(None)
            self._resubmit(in_flight, cause)

    def refuse(self, *, some_absent: bool = False) -> None:
        """End the requests that cannot be served, and expired ones.

        Args:
            some_absent: Some replicas have no connection at present.
        """
        self._submit_again(self._held.take(some_absent=some_absent))
        if self._router.num_waiting:
            refused = self._router.refuse(self._loop.time())
            for refusal in refused.refusals:
                in_flight = self.open.get(refusal.need.request_id)
                if in_flight is not None and not self._held.hold(refusal, some_absent=some_absent):
                    cause = self._adapters.cause_of(refusal.need.adapter) if refusal.reason == "room" else None
                    self._fail(in_flight, cause or in_flight.refused(refusal.reason))
            self.send(refused.placed)
        for in_flight in tuple(self.open.values()):
            if in_flight.replica is None and in_flight.has_expired:
                self._fail(in_flight, in_flight.deadline_missed())

    def submit_lacking(self) -> None:
        """Submit the requests again that wait for a content: a replica has joined."""
        self._submit_again(self._held.take_lacking())

    def stay_with(self, adapter: str, version: str) -> None:
        """Requests of an adapter, also those without a token so far, are answered with this content of it."""
        for in_flight in self.open.values():
            if in_flight.request.adapter == adapter:
                in_flight.stay_with(version)
                self._note_content(in_flight)

    @property
    def longest_wait_s(self) -> float:
        """How long a request has waited for a replica with room; 0 if none waits."""
        waiting = (in_flight for name, in_flight in self.open.items() if self._router.is_waiting(name))
        return max((in_flight.waited_s for in_flight in waiting if in_flight.replica is None), default=0.0)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_open(self, in_flight: InFlightRequest) -> bool:
        """Whether a request has not ended. Another one may have its id by now."""
        return self.open.get(in_flight.request.request_id) is in_flight

    def _need(self, in_flight: InFlightRequest) -> Need:
        request = in_flight.request
        old = self._needs.get(request.request_id)
        need = self._needs[request.request_id] = Need(
            request_id=request.request_id,
            adapter=request.adapter,
            blocks=self._blocks(in_flight),
            arrival=next(self._arrivals) if old is None else old.arrival,
            priority=request.priority,
            tenant=request.tenant,
            answer_by=in_flight.answer_by,
            returned=old is not None,
            prefix=self._prefix(request) if old is None else old.prefix,
            version=in_flight.version,
        )
        return need

    def _prefix(self, request: Request) -> tuple[bytes, ...]:
        adapter = request.adapter or ""
        return prefix_keys(request, f"{adapter}@{self.versions.get(adapter, '')}", self.block_size)

    def _blocks(self, in_flight: InFlightRequest) -> int:
        return (len(in_flight.request.prompt_ids) + len(in_flight.tokens)) // self.block_size + 1

    def _submit(self, in_flight: InFlightRequest) -> None:
        self.send(self._router.submit(self._need(in_flight)))

    def _submit_again(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (in_flight := self.open.get(request_id)) is not None:  # one may end while others are submitted
                self._submit(in_flight)

    def _resubmit(self, in_flight: InFlightRequest, cause: str) -> None:
        """Continue a request that is on no replica any more. cause: why it lost the last one."""
        if in_flight.cancelled:
            self._fail(in_flight, _cancelled(in_flight), "cancelled")
        elif in_flight.num_deaths >= MAX_DEATHS:
            deaths = f"{in_flight.num_deaths} replicas died while they computed this request"
            self._fail(in_flight, StepFailed(f"{deaths}, the last one: {cause}"))
        elif in_flight.num_deaths < MAX_DEATHS - 1 or self._may_run(in_flight.request.request_id):
            self._submit(in_flight)

    def _may_run(self, request_id: str) -> bool:
        """Suspect a request to be the cause of deaths. Returns whether it may run now."""
        if request_id not in self._suspects:
            self._suspects.append(request_id)
        return self._suspects[0] == request_id

    def _start(self, in_flight: InFlightRequest, name: str) -> None:
        client = self._client_of(name)
        if client is None or client.cause is not None:
            return  # the replica has died, and `replica_left` follows
        request = in_flight.begin(name, f"{self._key}.{next(self._attempts)}")
        if request is None:
            self._end(in_flight)  # its time has passed
            return
        attempt_id = request.request_id
        try:
            client.submit(request, lambda output: self._receive(in_flight, attempt_id, output))
        except BadRequest as error:
            self._fail(in_flight, error)

    def _receive(self, in_flight: InFlightRequest, attempt_id: str, output: RequestOutput) -> None:
        if in_flight.attempt_id != attempt_id or not self._is_open(in_flight):
            return  # of an earlier attempt
        code = None if output.error is None else output.error.code
        if code == EngineDead.code:
            if in_flight.leaving:
                self._lose_source(in_flight, output)
            return  # otherwise `replica_left` follows
        if in_flight.leaving and output.finish_reason == "cancelled" and not in_flight.cancelled:
            self._go_on(in_flight, output)
            return
        if code in _NO_CONTENT and self._may_be_elsewhere(in_flight):
            self._try_elsewhere(in_flight, output)
            return
        before, begins = self._blocks(in_flight), in_flight.version is None
        in_flight.receive(output)
        if output.finished:
            self._end(in_flight)
            self.on_answered()
            return
        if begins:
            self._note_content(in_flight)
        if (blocks := self._blocks(in_flight)) != before and self._router.where(
            in_flight.request.request_id
        ) is not None:
            self._router.grew(in_flight.request.request_id, blocks)

    def _leave_replica(self, in_flight: InFlightRequest) -> None:
        """Cancel the current attempt, and wait a moment for its last tokens."""
        in_flight.leaving = True
        in_flight.num_moves += 1
        self._events.num_moves += 1
        client = self._client_of(in_flight.replica)
        if client is None:
            self._go_on(in_flight, None)
            return
        attempt_id = in_flight.attempt_id
        client.post_cancel(attempt_id)
        self._loop.call_later(MOVE_S, self._stop_waiting, in_flight, attempt_id)

    def _fail(self, in_flight: InFlightRequest, error: VLoraError, reason: str = "error") -> None:
        """End a request with an error, unless it has ended."""
        if self._is_open(in_flight):
            self._detach(in_flight)
            in_flight.fail(ErrorValue.of(error), reason)
            self._end(in_flight)

    def _end(self, in_flight: InFlightRequest) -> None:
        """A request has its last output, which its caller may read later, or its caller has left."""
        request_id = in_flight.request.request_id
        del self.open[request_id]
        self._needs.pop(request_id, None)
        self._held.forget(request_id)
        self._adapters.former.request_ended(request_id)
        self._forget_lacking(in_flight)
        placed = self._router.ended(request_id)
        self.send(placed)
        if request_id in self._suspects:
            ran = self._suspects[0] == request_id
            self._suspects.remove(request_id)
            if ran and self._suspects:
                self._submit(self.open[self._suspects[0]])

    def _detach(self, in_flight: InFlightRequest) -> None:
        """Cancel the current attempt; nothing of it is expected any more."""
        client = self._client_of(in_flight.replica)
        if client is not None:
            client.abandon(in_flight.attempt_id)

    def _stop_waiting(self, in_flight: InFlightRequest, attempt_id: str) -> None:
        if in_flight.attempt_id == attempt_id and in_flight.leaving and self._is_open(in_flight):
            self._go_on(in_flight, None)

    def _go_on(self, in_flight: InFlightRequest, last: RequestOutput | None) -> None:
        self._detach(in_flight)
        in_flight.leave(last)
        if in_flight.cancelled:
            self._fail(in_flight, _cancelled(in_flight), "cancelled")
        else:
            self.follow(in_flight.request.request_id)

    def _lose_source(self, in_flight: InFlightRequest, output: RequestOutput) -> None:
        """A replica has died before a request had moved away. The router has it elsewhere, or waiting, already."""
        self._events.num_resubmitted += 1
        in_flight.num_deaths += 1
        in_flight.leave(None)
        self.send(self._router.ended(in_flight.request.request_id))
        self._resubmit(in_flight, "" if output.error is None else output.error.message)

    def _try_elsewhere(self, in_flight: InFlightRequest, output: RequestOutput) -> None:
        """A replica cannot load the request's adapter, or not with the content with which the answer began."""
        request_id, name, adapter = in_flight.request.request_id, in_flight.replica, in_flight.request.adapter
        assert name is not None and adapter is not None and output.error is not None
        is_moved = in_flight.leaving  # the router has it elsewhere, or waiting, already
        in_flight.refusal = in_flight.own_error(output.error)
        in_flight.leave(output)
        if in_flight.version is None:
            self._adapters.refused(name, adapter, output.error)
        else:
            in_flight.lacking.add(name)
            self.send(self._router.lack(name, adapter, in_flight.version))
        if not is_moved:
            self.send(self._router.ended(request_id))
        if in_flight.cancelled:  # its cancellation and the refusal have crossed
            self._fail(in_flight, _cancelled(in_flight), "cancelled")
        elif is_moved:
            self.follow(request_id)
        else:
            self._submit(in_flight)

    def _may_be_elsewhere(self, in_flight: InFlightRequest) -> bool:
        """Whether a replica other than its present one may have the adapter of a request."""
        others = any(name != in_flight.replica for name in self._adapters.homes)
        return others and (in_flight.version is not None or in_flight.request.adapter in self._adapters)

    def _note_content(self, in_flight: InFlightRequest) -> None:
        adapter, version, name = in_flight.request.adapter, in_flight.version, in_flight.replica
        if adapter is None or version is None or name is None:
            return
        if self._router.where(in_flight.request.request_id) is not None:
            self._router.began(in_flight.request.request_id, version)
        self._adapters.began(name, adapter, version)

    def _forget_lacking(self, in_flight: InFlightRequest) -> None:
        """Replicas that lacked a content get its requests again once none is left that they have refused."""
        adapter, version = in_flight.request.adapter, in_flight.version
        if adapter is None or version is None or (adapter, version) in self._adapters.former:
            return
        for name in sorted(in_flight.lacking & self._router.replicas.keys()):
            self.send(self._router.lack(name, adapter, version, False))


def _cancelled(in_flight: InFlightRequest) -> Aborted:
    return Aborted(f"request {in_flight.request.request_id!r} was cancelled")
