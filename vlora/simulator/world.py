"""Replicas under one router, from the first arrival to the last answer: a heap of events."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vlora.errors import BadConfig
from vlora.routing import Advice, MoveCosts, Need, Placed, Report, Room, Router, ScalingPolicy, ScalingSettings
from vlora.routing.scaling import Situation
from vlora.simulator.arrivals import Arrival, Job
from vlora.simulator.cluster_config import ClusterConfig
from vlora.simulator.measures import IDLE_S, Measures, Sample, contested_shares
from vlora.simulator.replica import Replica, ReplicaConfig
from vlora.simulator.stretches import QuickReplica

_STUCK_S = 1e6  # without an arrival or a step
_REFUSE_S = 0.1  # period in which the router refuses requests


AnyReplica = Replica | QuickReplica


class World:
    def __init__(self, config: ReplicaConfig, cluster: ClusterConfig) -> None:
        self._config, self._cluster = config, cluster
        self.router = Router(
            cluster.rule if cluster.routed else "least_loaded",  # a single replica takes everything at once
            over=cluster.over,
            weights=config.weights,
            tenant_weights=config.tenant_weights,
        )
        self.replicas: dict[str, AnyReplica] = {}
        self.measures = Measures()
        self.now = 0.0
        self._jobs: dict[str, Job] = {}
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._draws = random.Random(f"cluster {cluster.seed}")
        self._past: list[AnyReplica] = []
        self._num_active = 0
        self._counted_s = self._progress_s = 0.0
        self._bounded = False
        for _ in range(cluster.replicas):
            self._start(None)
        for period_s, action in (
            (cluster.consolidate_s, self._consolidate),
            (cluster.replan_s, lambda _: self.router.replan()),
            (cluster.rebalance_s, self._rebalance),
            (cluster.sample_s, self._sample),
            (Scaling.PERIOD_S if cluster.max_replicas else 0.0, Scaling(self, cluster).follow),
        ):
            if period_s and cluster.routed:
                self.at(period_s, self._every, (period_s, action))

    def run(self, arrivals: Iterable[Arrival]) -> Measures:
        """Run all arrivals, which are in order of time."""
        coming = iter(arrivals)
        arrival = next(coming, None)
        number = 0
        events = self._events
        while arrival is not None or self._jobs:
            if arrival is not None and (not events or arrival.time_s <= events[0][0]):
                self.now = self._progress_s = arrival.time_s
                self._arrive(str(number), number, arrival)
                number += 1
                arrival = next(coming, None)
                continue
            assert events, "a request was never answered"
            self.now, _, action, argument = heapq.heappop(events)
            assert self.now < self._progress_s + _STUCK_S, "a request was never answered"
            action(argument)
        self._close()
        return self.measures

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), action, argument))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self, request_id: str, number: int, arrival: Arrival) -> None:
        config = self._config
        if arrival.images and self._cluster.quick:
            raise BadConfig("quick replicas do not simulate images; simulate each step (--full), or leave images out")
        size = config.block_size
        if -(-(arrival.prompt_tokens + arrival.answer_tokens) // size) > -(-config.kv_tokens // size):
            self.measures.num_refused += 1
            return
        bound_s = config.max_ttft_s if arrival.max_ttft_s is None else arrival.max_ttft_s
        if bound_s is not None and not self._bounded:
            self._bounded = True
            if self.router.rule.queues:
                self.at(self.now + _REFUSE_S, self._every, (_REFUSE_S, self._refuse))
        prefix: tuple[bytes, ...] = ()
        if arrival.prefix is not None:
            prefix = _keys(arrival.adapter, arrival.prefix, arrival.prefix_tokens // size)
        need = Need(
            request_id,
            arrival.adapter,
            arrival.prompt_tokens // size + 1,
            number,
            arrival.priority,
            arrival.tenant,
            None if bound_s is None else arrival.time_s + bound_s,
            prefix=prefix,
        )
        self._jobs[request_id] = Job(arrival, need)
        self._send(self.router.submit(need))
        self.measures.most_waiting = max(self.measures.most_waiting, self.router.num_waiting)

    def _send(self, placed: Sequence[Placed]) -> None:
        for need, name in placed:
            job = self._jobs[need.request_id]
            job.need = need
            self._put(job, self.replicas[name])

    def _put(self, job: Job, replica: AnyReplica) -> None:
        replica.taken += 1
        if not replica.alive:
            return  # the router does not know yet; it will submit the request again
        if replica.size == 1:
            self._count_active(1)
        replica.send(job, self.now)
        self._schedule(replica)

    def _schedule(self, replica: AnyReplica) -> None:
        if replica.next_s != replica.pushed_s:
            replica.pushed_s = replica.next_s
            if replica.next_s < IDLE_S:
                self.at(replica.next_s, self._advance, replica)

    def _advance(self, replica: AnyReplica) -> None:
        if not replica.alive or replica.next_s != self.now:
            return  # the replica's plan has changed since
        self._progress_s, replica.pushed_s = self.now, IDLE_S
        ended = replica.advance()
        if not self._cluster.report_s:
            # As of before the ends, which follow at once.
            free_blocks = replica.free_blocks() - sum(job.need.blocks for job in ended)
            self._report(replica, free_blocks)
        self._schedule(replica)
        for job in ended:
            replica.ended += 1
            if not replica.size:
                self._count_active(-1)
            del self._jobs[job.need.request_id]
            if job.refused_s >= 0:
                self.measures.add_refusal(job.arrival, job.refused_s - job.arrival.time_s)
            else:
                self.measures.add_answer(job, self.now, self._config.max_ttft_s)
        for job in ended:
            self._send(self.router.ended(job.need.request_id))

    def _refuse(self, _: None) -> None:
        refusals, placed = self.router.refuse(self.now)
        for need, _reason in refusals:
            job = self._jobs.pop(need.request_id)
            self.measures.add_refusal(job.arrival, self.now - job.arrival.time_s)
        self._send(placed)

    # -- reports ------------------------------------------------------------------------------------------------------

    def _report(self, replica: AnyReplica, free_blocks: int) -> None:
        adapters = replica.adapters if replica.num_loads != replica.num_reported else None
        replica.num_reported = replica.num_loads
        report = Report(free_blocks, replica.taken, replica.ended, None, adapters)
        self._send(self.router.report(replica.name, report))

    def _make_report(self, replica: AnyReplica) -> None:
        """Make a report, which arrives later, and the next one after a period."""
        if not replica.alive:
            return
        report = Report(replica.free_blocks(), replica.taken, replica.ended, None, frozenset(replica.adapters))
        age_s = self._draws.uniform(0, self._cluster.report_age_s)
        self.at(self.now + age_s, self._deliver, (replica, report))
        self.at(self.now + self._cluster.report_s, self._make_report, replica)

    def _deliver(self, made: tuple[AnyReplica, Report]) -> None:
        replica, report = made
        if self.replicas.get(replica.name) is replica:
            self._send(self.router.report(replica.name, report))

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _start(self, _: None) -> None:
        name = f"{next(self._names):05d}"
        quick = self._cluster.quick
        replica: AnyReplica = QuickReplica(name, self._config, self._overflow) if quick else Replica(self._config, name)
        self.replicas[name] = replica
        config, cluster = self._config, self._cluster
        room = Room(config.max_batch_size, -(-config.kv_tokens // config.block_size), config.resident_adapters)
        if cluster.mtbf_s:
            self.at(self.now + self._draws.expovariate(1 / cluster.mtbf_s), self._fail, replica)
        if cluster.report_s:
            self.at(self.now + self._draws.uniform(0, cluster.report_s), self._make_report, replica)
        self._send(self.router.join(name, room))

    def start_after(self, delay_s: float) -> None:
        self.at(self.now + delay_s, self._start, None)

    def longest_wait_s(self) -> float:
        """How long a request without an answer has waited in the router; 0 if none waits."""
        if not self.router.num_waiting:
            return 0.0
        waiting = (job for name, job in self._jobs.items() if job.first_s < 0 and self.router.is_waiting(name))
        return max((self.now - job.arrival.time_s for job in waiting), default=0.0)

    def release(self, name: str) -> None:
        lost = self.router.leave(name)
        assert not lost
        replica = self.replicas.pop(name)
        if replica.alive:
            replica.alive = False
            self._past.append(replica)

    def resume(self, name: str) -> None:
        self._send(self.router.drain(name, draining=False))

    def _fail(self, replica: AnyReplica) -> None:
        if not replica.alive:
            return
        replica.alive = False
        self._past.append(replica)
        self.measures.num_failures += 1
        for job in list(replica.jobs):
            replica.remove(job, self.now)
        if replica.size:
            self._count_active(-1)
        self.at(self.now + self._cluster.detect_s, self._detect, replica)

    def _detect(self, replica: AnyReplica) -> None:
        """The router learns of a failure: the requests go elsewhere, with what they have answered."""
        name = replica.name
        if self.replicas.get(name) is not replica:
            return  # it was idle and has been released
        lost = self.router.leave(name)
        del self.replicas[name]
        for need in lost:
            self._resubmit(self._jobs[need.request_id])
        self.start_after(self._cluster.restart_s)

    def _resubmit(self, job: Job) -> None:
        self.measures.num_resubmitted += 1
        self.measures.num_recomputed += job.num_tokens
        blocks = job.num_tokens // self._config.block_size + 1
        job.need = job.need._replace(
            blocks=blocks, returned=True, answer_by=None if job.first_s >= 0 else job.need.answer_by
        )
        self._send(self.router.submit(job.need))

    # -- moves --------------------------------------------------------------------------------------------------------

    def _overflow(self, replica: QuickReplica) -> bool:
        """A replica's KV memory is full: its newest request goes elsewhere, if there is another replica."""
        if len(self.replicas) < 2:
            return False
        eviction = self.router.evict(replica.name)
        if eviction is None:
            return False
        self.measures.num_evictions += 1
        self._take(self._jobs[eviction.need.request_id], self.replicas[replica.name])
        self._send(eviction.placed)
        return True

    def _take(self, job: Job, replica: AnyReplica) -> None:
        replica.remove(job, self.now)
        replica.ended += 1
        self.measures.num_recomputed += job.num_tokens
        if not replica.size:
            self._count_active(-1)
        self._schedule(replica)

    def _consolidate(self, _: None) -> None:
        self._move(self.router.consolidate())

    def _rebalance(self, _: None) -> None:
        finished = self.measures.num_finished
        if finished:
            replicas = (*self._past, *(replica for replica in self.replicas.values() if replica.alive))
            busy_s = sum(replica.totals().busy_s for replica in replicas)
            again_s = self._config.costs.merged_s(self.measures.num_tokens / finished, 0)
            self._move(self.router.rebalance(busy_s / finished, MoveCosts(self._config.load_s, again_s)))

    def _move(self, moves: Sequence[tuple[str, str, str]]) -> None:
        for request_id, source, target in moves:
            job = self._jobs[request_id]
            self.measures.num_moves += 1
            if self.replicas[source].alive:
                self._take(job, self.replicas[source])
            self.router.grew(request_id, job.num_tokens // self._config.block_size + 1)
            self._put(job, self.replicas[target])

    # -- time ---------------------------------------------------------------------------------------------------------

    def _every(self, periodic: tuple[float, Callable[[Any], None]]) -> None:
        period_s, action = periodic
        action(None)
        self.at(self.now + period_s, self._every, periodic)

    def _count_active(self, change: int) -> None:
        self.measures.active_s += self._num_active * (self.now - self._counted_s)
        self._counted_s = self.now
        self._num_active += change

    def _sample(self, _: None) -> None:
        sizes = {name: replica.size for name, replica in self.replicas.items()}
        self.measures.samples.append(Sample(self.now, sizes, self.router.num_waiting))

    def _close(self) -> None:
        self._count_active(0)
        replicas = [*self._past, *(replica for replica in self.replicas.values() if replica.alive)]
        shares = contested_shares(replica.contention for replica in replicas if isinstance(replica, Replica))
        self.measures.close([replica.totals() for replica in replicas], self.now, shares)
        if self._cluster.routed:
            self.measures.rule = self.router.rule.name


@functools.lru_cache(maxsize=4096)
def _keys(adapter: str | None, prefix: str, number: int) -> tuple[bytes, ...]:
    return tuple(f"{adapter}\0{prefix}\0{place}".encode() for place in range(number))


_ONE = ClusterConfig()


def replay(arrivals: Iterable[Arrival], config: ReplicaConfig, cluster: ClusterConfig = _ONE) -> Measures:
    """Run all arrivals on replicas with these resources and settings, by default on one."""
    return World(config, cluster).run(arrivals)


class Scaling:
    """Adds and releases replicas. Unlike a live cluster it may end any of them, and all starts succeed."""

    PERIOD_S = 1.0

    def __init__(self, world: World, cluster: ClusterConfig) -> None:
        self._world, self._cluster = world, cluster
        most = cluster.max_replicas or cluster.replicas
        self._policy = ScalingPolicy(ScalingSettings(cluster.replicas, most, cluster.up_after_s, cluster.down_after_s))
        self._starting: list[float] = []  # when each replica that was added serves
        self._releasing: list[str] = []  # replicas that drain in order to end

    def follow(self, _periodic: None) -> None:
        world, cluster = self._world, self._cluster
        now, router = world.now, world.router
        starting = [time_s for time_s in self._starting if time_s > now]
        if len(starting) < len(self._starting):
            self._policy.joined(now)
        self._starting = starting
        self._end_idle()
        advice = router.advice()
        # Failed replicas are replaced apart from this, so there are soon the least number again.
        number = max(cluster.replicas, len(router.replicas) - len(self._releasing) + len(starting))
        seen = Situation(number, len(starting), True, advice, world.longest_wait_s())
        decision = self._policy.decide(now, seen)
        if decision is None:
            return
        if decision.number < number:
            self._drain_one(advice)
        for _ in range(decision.number - number):
            if self._releasing:
                world.resume(self._releasing.pop())
            else:
                self._starting.append(now + cluster.start_s)
                world.start_after(cluster.start_s)

    def _drain_one(self, advice: Advice) -> None:
        names = [name for name in (*advice.release, *advice.drain) if name not in self._releasing][:1]
        for name in names:
            self._world.router.drain(name)
            self._releasing.append(name)
        self._end_idle()

    def _end_idle(self) -> None:
        """End what has been drained. A replica that has failed is none of them any more."""
        replicas = self._world.router.replicas
        self._releasing = [name for name in self._releasing if name in replicas]
        for name in [name for name in self._releasing if not replicas[name].size]:
            self._releasing.remove(name)
            self._world.release(name)
