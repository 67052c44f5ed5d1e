"""A replica of a world with the engine's own scheduler and bookkeeping: exact, for any policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from vlora.errors import DeadlineUnreachable
from vlora.simulator.replica import Replica, ReplicaConfig
from vlora.simulator.simulated_replica import IDLE_S, Job, Totals
from vlora.simulator.tenants import TenantContention
from vlora.types import RequestOutput

_NO_BOUND_S = 1e9


class ExactReplica:
    """`Replica` as a `SimulatedReplica`. A step is computed when it begins; its answers count when it ends."""

    def __init__(self, name: str, config: ReplicaConfig) -> None:
        self.name = name
        self.next_s = IDLE_S
        self._replica = Replica(config)
        self._block_size = config.block_size
        self._jobs: dict[str, Job] = {}
        self._sent_s: dict[str, float] = {}  # on the replica's clock
        self._pending: list[RequestOutput] = []
        self._busy_s = self._batch_s = 0.0

    @property
    def jobs(self) -> Collection[Job]:
        return self._jobs.values()

    @property
    def adapters(self) -> Set[str]:
        return self._replica.adapter_cache.resident

    @property
    def num_loads(self) -> int:
        return self._replica.num_loads

    @property
    def contention(self) -> TenantContention:
        return self._replica.contention

    def send(self, job: Job, now: float) -> None:
        """Raises PromptTooLong if the request does not fit in memory even alone."""
        arrival, replica = job.arrival, self._replica
        if job.answered:
            arrival = arrival._replace(prompt_tokens=job.num_tokens, answer_tokens=job.left)
        if job.first_s >= 0:
            arrival = arrival._replace(max_ttft_s=_NO_BOUND_S)
        replica.wait_until(now)
        replica.add(job.need.request_id, arrival)
        self._jobs[job.need.request_id] = job
        self._sent_s[job.need.request_id] = replica.clock.now
        if not self._pending:
            self.next_s = min(self.next_s, max(now, replica.clock.now))

    def remove(self, job: Job, now: float) -> None:
        request_id = job.need.request_id
        output = self._replica.cancel(request_id)
        if output is None:  # its last answer is under way, and is lost
            output = next(each for each in self._pending if each.request_id == request_id)
            self._pending.remove(output)
        timings = output.timings
        assert timings is not None
        self._note_first(job, output)
        job.answered += min(timings.num_completion_tokens, job.left - 1)
        del self._jobs[request_id], self._sent_s[request_id]

    def advance(self) -> list[Job]:
        now = self.next_s
        ended, self._pending = self._end(self._pending, now), []
        if not self._replica.scheduler.has_work:
            self.next_s = IDLE_S
            return ended
        self._replica.wait_until(now)
        early, self._pending, self.next_s = self._replica.step()
        ended += self._end(early, now)
        self._busy_s += self.next_s - now
        self._batch_s += (self.next_s - now) * len(self._jobs)
        return ended

    def _end(self, outputs: Iterable[RequestOutput], now: float) -> list[Job]:
        ended = []
        for output in outputs:
            job = self._jobs.pop(output.request_id)
            if output.error is not None:
                assert output.error.code == DeadlineUnreachable.code
                job.refused_s = now
            else:
                self._note_first(job, output)
            del self._sent_s[output.request_id]
            ended.append(job)
        return ended

    def free_blocks(self) -> int:
        block_manager = self._replica.block_manager
        waiting = (job for job in self.jobs if not block_manager.table(job.need.request_id))
        needed = sum(-(-job.num_tokens // self._block_size) for job in waiting)
        return block_manager.num_free_blocks - needed - len(self._jobs)

    def totals(self) -> Totals:
        stats, waits = self._replica.stats(), self._replica.scheduler.waits
        return Totals(
            dict(stats.steps_by_mode),
            stats.num_switches,
            stats.switch_s,
            stats.num_preemptions,
            self._replica.num_loads,
            self._busy_s,
            self._batch_s,
            waits.longest_s,
            waits.bound_s,
        )

    def _note_first(self, job: Job, output: RequestOutput) -> None:
        """Note the time of the first answer, and the prefix hits of the first life."""
        timings = output.timings
        assert timings is not None
        if job.first_s < 0 and timings.ttft_s is not None:
            job.first_s = self._sent_s[output.request_id] + timings.ttft_s
            job.num_reused = timings.num_cached_tokens
