"""The router: the queue, the replicas' loads, and one rule. Used by the live cluster and by the simulator.

Every call returns what is to be done; the caller does it. The router has no clock, sends nothing and holds no tokens.
Its state can be built again at any time: from the replicas' rooms and reports, and from the unfinished requests.

    router = Router("placed")
    router.join("a", Room(max_batch_size=16, blocks=4096))
    for need, replica in router.submit(Need("1", "signs", blocks=20, arrival=0)):
        ...                                   # send request `need.request_id` to `replica`
    for need, replica in router.ended("1"):   # its last output has arrived, or it was cancelled
        ...

A request that returns, because its replica ended or ran out of memory, is submitted again with its old `arrival`, its
present `blocks` and `returned=True`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from vlora.errors import BadConfig
from vlora.routing.fleet import Fleet
from vlora.routing.placement import Group, MoveCosts, reactive
from vlora.routing.replica_load import Need, ReplicaLoad, Report, Room
from vlora.routing.rules import RULES, Rule
from vlora.routing.waiting import WaitingQueue

_LESS = 0.8  # of a light load, below which a replica is drained, so that it is not wanted again soon
_MOST_RECALLED = 2  # that wait at a time: one for the next place, and one for the place after it


class Placed(NamedTuple):
    need: Need
    replica: str


class Move(NamedTuple):
    """A request to cancel on one replica and to send to another, with what it has answered. It is counted there."""

    request_id: str
    source: str
    target: str


class Eviction(NamedTuple):
    """A request to cancel on its replica, and the requests to send now; if it is not among them, it waits."""

    need: Need
    placed: list[Placed]


class Recalled(NamedTuple):
    """The outcome of `Router.recall`: requests to cancel on their replicas, which wait now, and requests to send."""

    needs: list[Need]
    placed: list[Placed]


class Refusal(NamedTuple):
    """A waiting request that was removed, since it cannot be served. reason: "deadline", "room" or "content"."""

    need: Need
    reason: str


class Refused(NamedTuple):
    """The outcome of `Router.refuse`: the requests that were removed, and the requests to send now."""

    refusals: list[Refusal]
    placed: list[Placed]


class Advice(NamedTuple):
    """How the number of replicas should change.

    Attributes:
        add: replicas wanted in addition.
        release: idle replicas that may end at once.
        drain: replicas that may be drained, because the others have room for all requests.
    """

    add: int
    release: tuple[str, ...]
    drain: tuple[str, ...]


class Router:
    """Decides which replica gets which request.

    Requests wait here while no replica has room, in the order of `WaitingQueue`; no request is placed before the first.
    Waiting bound: with n older requests waiting, at most `OLDEST_EVERY` * (n + 1) requests that had not returned are
    placed before a request, under every rule that queues. On a replica the waiting bound of its scheduler applies.

    Args:
        over: requests that a replica takes at a time, in batches; None for the rule's own.
        weights, tenant_weights: fair shares, as of the scheduler.

    Raises:
        BadConfig: no rule has this name, or `over` is below 1.
    """

    def __init__(
        self,
        rule: str | Rule = "placed",
        *,
        over: float | None = None,
        weights: Mapping[str, float] | None = None,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        if isinstance(rule, str):
            if rule not in RULES:
                raise BadConfig(f"no routing rule named {rule!r}; choose one of {', '.join(RULES)}")
            rule = RULES[rule]()
        if over is not None and over < 1:
            raise BadConfig(f"over is {over:g}; a replica takes at least one batch, so it must be 1 or more")
        self.rule = rule
        self._over = rule.over if over is None or not rule.queues else over
        self._fleet = Fleet()
        self._place_of: dict[str, ReplicaLoad] = {}
        self._queue = WaitingQueue(weights or {}, tenant_weights or {}, by_arrival=rule.by_arrival)
        self._blocked: Need | None = None  # first request, if no replica has had room for it since

    # -- replicas -----------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> Mapping[str, ReplicaLoad]:
        return self._fleet.replicas

    @property
    def num_loads(self) -> int:
        """Requests that were sent to a replica without their adapter."""
        return self._fleet.num_loads

    def join(self, name: str, room: Room, draining: bool = False) -> list[Placed]:
        """A replica serves from now on, without requests and adapters; if it drains, it gets none."""
        replica = ReplicaLoad(name, room, self._over)
        self._fleet.add(replica)
        self._fleet.set_draining(replica, draining)
        return self._place_waiting(replica)

    def leave(self, name: str) -> list[Need]:
        """A replica has ended. Returns its requests, the oldest first, for the caller to submit again."""
        replica = self._fleet.remove(name)
        lost = sorted(replica.holds.values(), key=lambda need: need.arrival)
        for need in lost:
            del self._place_of[need.request_id]
            self._queue.remove(need.request_id)
        return lost

    def drain(self, name: str, draining: bool = True) -> list[Placed]:
        """Send no further requests to a replica; `consolidate` then moves its requests away. False ends this."""
        replica = self.replicas[name]
        self._fleet.set_draining(replica, draining)
        return self._place_waiting(replica)

    def bar(self, name: str, adapter: str, barred: bool = True) -> list[Placed]:
        """A replica cannot load an adapter, so it gets no requests of it. False: it can again."""
        replica = self.replicas[name]
        (replica.barred.add if barred else replica.barred.discard)(adapter)
        return self._place_waiting(replica)

    def lack(self, name: str, adapter: str, version: str, lacks: bool = True) -> list[Placed]:
        """A replica does not have a content of an adapter: it gets no answers that began with it. False: it may."""
        replica = self.replicas[name]
        (replica.lacks.add if lacks else replica.lacks.discard)((adapter, version))
        return self._place_waiting(replica)

    def report(self, name: str, report: Report) -> list[Placed]:
        """A replica has reported. Reports may be late; what was sent since is added."""
        return self._place_waiting(self._fleet.report(name, report))

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def where(self, request_id: str) -> str | None:
        """The replica of a request; None if it waits here or is not known."""
        replica = self._place_of.get(request_id)
        return None if replica is None else replica.name

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._queue

    def submit(self, need: Need) -> list[Placed]:
        """A request arrives or returns. Returns the requests to send now; if it is not among them, it waits."""
        self.rule.submitted(need)
        self._queue.add(need)
        return self._place_waiting()

    def ended(self, request_id: str) -> list[Placed]:
        """A request has ended or was cancelled, on a replica or waiting. Returns the requests to send now.

        One that the router does not have, since it ended after its replica and before it was submitted again, is
        ignored.
        """
        replica = self._place_of.pop(request_id, None)
        if replica is not None:
            self._fleet.release(request_id, replica)
        elif request_id not in self._queue:
            return []
        self._queue.remove(request_id)
        return self._place_waiting(replica)

    def grew(self, request_id: str, blocks: int) -> None:
        """A request on a replica holds so many KV blocks by now."""
        self._queue.count_service(request_id, self._place_of[request_id].grow(request_id, blocks))

    def began(self, request_id: str, version: str) -> None:
        """A request on a replica has its first tokens: its answer continues only with this content of its adapter."""
        holds = self._place_of[request_id].holds
        holds[request_id] = holds[request_id]._replace(version=version)

    def refuse(self, now: float, first_answer_s: float = 0.0) -> Refused:
        """Remove the waiting requests that cannot be served: call it every 100 ms or so, and after `leave` and `bar`.

        Args:
            now: the time, on the clock of `Need.answer_by`.
            first_answer_s: the least time from being sent to the first answer.

        Returns:
            The requests with a first answer that would be too late even if they were sent now, and, with replicas,
            those that none of them could take even without other requests; then the requests to send. Replicas that
            drain count only if all do: requests that wait for one of them would hold up all others. An answer that
            began with a content that only replicas that drain have is sent to one of them.
        """
        serving = [s for s in self.replicas.values() if not s.draining] or list(self.replicas.values())
        refused: list[Refusal] = []
        placed: list[Placed] = []
        unfit: dict[tuple[int, str | None, str | None], bool] = {}
        for need in list(self._queue):
            if need.answer_by is not None and now + first_answer_s > need.answer_by:
                refused.append(Refusal(need, "deadline"))
                continue
            key = need.blocks, need.adapter, need.version
            if key not in unfit:
                unfit[key] = bool(serving) and not any(s.could_take(need) for s in serving)
            if not unfit[key]:
                continue
            last = [s for s in self.replicas.values() if need.version is not None and s.could_take(need)]
            if last:
                best = min(last, key=lambda s: (s.size, s.name))
                self._queue.place(need.request_id)
                self._place(need, best)
                placed.append(Placed(need, best.name))
            else:
                fits = any(s.could_take(need._replace(version=None)) for s in serving)
                refused.append(Refusal(need, "content" if fits else "room"))
        for refusal in refused:
            self._queue.remove(refusal.need.request_id)
        return Refused(refused, placed + (self._place_waiting() if refused or placed else []))

    # -- moves --------------------------------------------------------------------------------------------------------

    def evict(self, name: str) -> Eviction | None:
        """A replica is out of KV memory: its newest request goes elsewhere or waits (Punica section 5.3).

        None if it has no second request.
        """
        replica = self.replicas[name]
        if len(replica.holds) < 2:
            return None
        need = max(replica.holds.values(), key=lambda each: each.arrival)
        was_draining = replica.draining
        self._fleet.set_draining(replica, True)  # not back to where it was
        placed = self.ended(need.request_id)
        need = need._replace(returned=True)
        placed += self.submit(need)
        self._fleet.set_draining(replica, was_draining)
        self._blocked = None
        return Eviction(need, placed)

    def consolidate(self, most: int = 32) -> list[Move]:
        """Move requests so that a replica becomes idle: first of those that drain, as far as there is room.

        Rules that fill busy replicas first also empty the least loaded replica, if all of its requests fit into busier
        ones; otherwise nothing is moved.
        """
        if self.num_waiting:
            return []
        draining = [s for s in self.replicas.values() if s.draining and s.holds]
        if draining:
            source = min(draining, key=lambda s: (s.size, s.name))
            needs = sorted(source.holds.values(), key=lambda need: need.arrival)[:most]
            moves = []
            for need in needs:
                target = self.rule.choose(self._fleet, need)
                if target is not None:
                    moves.append(self._move(need, source, target))
            return moves
        return self._empty_the_lightest(most) if self.rule.consolidates else []

    def recall(self, most: int = _MOST_RECALLED) -> Recalled:
        """Let requests of draining replicas wait again, while no replica has room: `consolidate` moves none then.

        They have returned, so they get the next places before all requests that have not. The newest ones come first:
        least of them is computed again, and the others may end meanwhile. One that no replica could take even without
        other requests stays where it is.

        Args:
            most: upper limit of the returned requests that wait, since a waiting one makes no progress.
        """
        needs: list[Need] = []
        placed: list[Placed] = []
        serving = [s for s in self.replicas.values() if not s.draining]
        left = most - sum(need.returned for need in self._queue)
        held = [need for s in self.replicas.values() if s.draining for need in s.holds.values()]
        for need in sorted(held, key=lambda each: -each.arrival):
            if len(needs) >= left or not self.num_waiting:
                break
            if any(s.could_take(need) for s in serving):
                # It was accepted, so it is not refused for its first answer any more.
                needs.append(need._replace(returned=True, answer_by=None))
                placed += self.ended(need.request_id)
                placed += self.submit(needs[-1])
        return Recalled(needs, placed)

    def rebalance(self, request_s: float, costs: MoveCosts, most: int = 64) -> list[Move]:
        """Move requests from replicas that finish late to those that finish early (`placement.reactive`).

        Args:
            request_s: the seconds that a request still costs its replica, on average.
        """
        serving = [s for s in self.replicas.values() if not s.draining]
        if len(serving) < 2 or self.num_waiting:
            return []
        groups = [
            Group(adapter, s.name, count, request_s)
            for s in serving
            for adapter, count in Counter(need.adapter for need in s.holds.values()).items()
        ]
        slots = {s.name: s.room.adapters for s in serving}
        moves: list[Move] = []
        for shift in reactive(groups, {s.name: s.resident.keys() for s in serving}, slots, costs):
            source, target = self.replicas[shift.source], self.replicas[shift.target]
            own = [need for need in source.holds.values() if need.adapter == shift.adapter]
            newest = sorted(own, key=lambda need: -need.arrival)
            for need in newest[: shift.number]:
                if len(moves) < most and target.takes(need):
                    moves.append(self._move(need, source, target))
        return moves

    # -- planning -----------------------------------------------------------------------------------------------------

    def replan(self) -> None:
        """Let the rule plan the homes of adapters: call it every minute or so, and after `join` and `leave`."""
        self.rule.replan(self._fleet)

    def advice(self, light: float = 0.5) -> Advice:
        """Whether more or fewer replicas are wanted; the caller waits until the advice has been the same for a while.

        As in Punica: more, if no replica is lightly loaded; idle ones may be released, and one of them is kept for the
        next request if no other is lightly loaded. A rule that distributes requests leaves none idle; then one may be
        drained if the others remain lightly loaded with its requests.

        Args:
            light: part of a batch below which a replica is lightly loaded.
        """
        serving = [s for s in self.replicas.values() if not s.draining]
        lightly = [s for s in serving if s.size < light * s.room.max_batch_size]
        batches = self.num_waiting // max(s.room.max_batch_size for s in serving) if serving else 0
        add = 0 if lightly else 1 + batches
        # The last one is kept: a serving one, and of these the one that the rule uses first.
        by_name = sorted(self.replicas.values(), key=lambda s: s.name, reverse=not self.rule.consolidates)
        idle = [s.name for s in sorted(by_name, key=lambda s: not s.draining) if not s.size]
        keep = 0 if any(s.size for s in lightly) else 1
        release = tuple(idle[: max(0, len(idle) - keep)])
        drain: tuple[str, ...] = ()
        if not idle and not self.num_waiting and len(serving) > 1:
            # The one that the rule uses last, whatever its load: the same one as long as the load is low.
            first, *rest = [s for s in by_name if not s.draining]
            if sum(s.size for s in serving) < _LESS * light * sum(s.room.max_batch_size for s in rest):
                drain = (first.name,)
        return Advice(add, release, drain)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _place_waiting(self, changed: ReplicaLoad | None = None) -> list[Placed]:
        """Place requests in order until one finds no room.

        changed: the only replica that may have more room than before.
        """
        placed: list[Placed] = []
        while (need := self._queue.first) is not None:
            if need is self._blocked and self.rule.queues and not (changed and changed.takes(need)):
                break
            replica = self.rule.choose(self._fleet, need)
            if replica is None:
                self._blocked = need
                break
            self._queue.place(need.request_id)
            self._place(need, replica)
            placed.append(Placed(need, replica.name))
        return placed

    def _place(self, need: Need, replica: ReplicaLoad) -> None:
        self._fleet.send(need, replica)
        self._place_of[need.request_id] = replica

    def _move(self, need: Need, source: ReplicaLoad, target: ReplicaLoad) -> Move:
        self._fleet.release(need.request_id, source)
        self._place(need, target)
        return Move(need.request_id, source.name, target.name)

    def _empty_the_lightest(self, most: int) -> list[Move]:
        busy = [s for s in self.replicas.values() if s.holds and not s.draining]
        if len(busy) < 2:
            return []
        source = min(busy, key=lambda s: (s.size, s.name))
        if source.size > most:
            return []
        busier = sorted((s for s in busy if s is not source), key=lambda s: (-s.size, s.name))
        left = {s.name: [s.capacity - s.size, s.free_blocks] for s in busier}
        targets: list[tuple[Need, ReplicaLoad]] = []
        for need in sorted(source.holds.values(), key=lambda each: -each.blocks):
            fits = (s for s in busier if left[s.name][0] > 0 and left[s.name][1] >= need.blocks and s.serves(need))
            target = next(fits, None)
            if target is None:
                return []
            left[target.name][0] -= 1
            left[target.name][1] -= need.blocks
            targets.append((need, target))
        return [self._move(need, source, target) for need, target in targets]
