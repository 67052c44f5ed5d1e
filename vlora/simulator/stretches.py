"""A quick replica: between two events a batch does not change, so all of its steps are one event.

The times of decode steps of an unchanged batch are an arithmetic series, since its context grows by one token per
request. Events are a finished answer, an arrival, an adapter that becomes usable, and full KV memory.

Steps are unmerged, prompts are computed in order of arrival and before decode steps of the same step budget, as
`unmerged_only` does without starving requests. Deadlines are not refused here, but by the router. Images, which an
engine encodes in pieces beside its steps, are not simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Set

from vlora.errors import PromptTooLong
from vlora.simulator.arrivals import Job
from vlora.simulator.measures import IDLE_S, Totals
from vlora.simulator.replica import ReplicaConfig, SimulatedReplica
from vlora.types import Mode


class _Part:
    """A request on this replica."""

    __slots__ = ("adapter", "ends", "job", "left", "prompt", "ready_s", "reused")

    def __init__(self, job: Job, reused: int) -> None:
        self.job = job
        self.adapter = job.arrival.adapter
        self.prompt = job.num_tokens  # to have in KV before its next answer
        self.reused = reused  # of these, tokens that the prefix cache had
        self.left = job.num_tokens - reused  # of these, tokens to compute
        self.ends = 0  # number of the step after which it is answered, while it decodes
        self.ready_s = 0.0


class QuickReplica(SimulatedReplica):
    """A `Replica` in a world that computes stretches of steps.

    Args:
        config: its resources; policy, fair shares and deadlines are not applied.
        overflow: called when KV memory is full; takes one request away and returns True, or returns False.
    """

    def __init__(self, name: str, config: ReplicaConfig, overflow: Callable[[QuickReplica], bool]) -> None:
        super().__init__(name)  # next_s: the end of the present stretch
        self._config, self._costs = config, config.costs
        self._overflow = overflow
        self._parts: dict[str, _Part] = {}
        self._numbers = itertools.count()
        self._at = 0.0  # begin of the present stretch
        self._steps = 0  # of the present stretch
        self._first_s = self._slope_s = 0.0  # its first step, and how much each further one takes longer
        self._prefilling = False
        self._count = 0  # steps so far
        self._decoding: list[tuple[int, int, _Part]] = []  # heap by `ends`
        self._waiting: deque[_Part] = deque()
        self._chunks: list[tuple[_Part, int]] = []  # prompt tokens of the present step
        self._context = 0  # tokens in KV of decoding requests
        self._held = 0  # tokens in KV of prompts under way
        self._lanes: dict[str, int] = {}  # decoding requests by adapter
        self._lanes_s = 0.0
        self._ready_s: dict[str, float] = {}  # by adapter on the device, the least recently used first
        self._loader_free_s = 0.0
        self._prefixes: dict[tuple[str | None, str], int] = {}  # tokens computed until their last use, oldest first
        self._computed = 0
        self.num_loads = 0
        self._num_preemptions = 0

    @property
    def jobs(self) -> Collection[Job]:
        return [part.job for part in self._parts.values()]

    @property
    def adapters(self) -> Set[str]:
        return self._ready_s.keys()

    def send(self, job: Job, now: float) -> None:
        """Raises PromptTooLong if the request does not fit in memory even alone."""
        if job.num_tokens + job.left > self._config.kv_tokens:
            raise PromptTooLong(f"{job.num_tokens + job.left} tokens exceed kv_tokens, {self._config.kv_tokens}")
        part = self._parts[job.need.request_id] = _Part(job, self._reused(job))
        part.ready_s = self._load(part.adapter, now)
        self._waiting.append(part)
        if not self._prefilling and not self._decoding:
            self._at = now
            self._plan()
        elif not self._prefilling and len(self._decoding) < self._config.max_batch_size:
            self._cut(max(now, part.ready_s))

    def remove(self, job: Job, now: float) -> None:
        self._settle(now)
        part = self._parts.pop(job.need.request_id)
        self._take_off(part)
        self._chunks = []
        self._at = now
        self._plan()

    def advance(self) -> list[Job]:
        ended = self._end_stretch()
        self._plan()
        return ended

    def free_blocks(self) -> int:
        used = self._context + self._held + sum(part.left for part in self._waiting)
        return (self._config.kv_tokens - used) // self._config.block_size - len(self._parts)

    def totals(self) -> Totals:
        return Totals(
            {Mode.UNMERGED.value: self._count},
            0,
            0.0,
            self._num_preemptions,
            self.num_loads,
            self.busy_s,
            self.batch_s,
        )

    # -- stretches ----------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        while True:
            if self._plan_prompts():
                return
            if self._decoding:
                fit = max(0, self._config.kv_tokens - self._context - self._held) // len(self._decoding)
                if fit or len(self._parts) == 1:
                    self._plan_decoding(max(1, fit))
                    return
                if not self._overflow(self):
                    self._preempt_newest()
                continue
            soon = min((part.ready_s for part in self._waiting), default=IDLE_S)
            if soon <= self._at:
                # Only prompts under way hold memory: the oldest of them continues.
                self._release_prompts()
                continue
            self.next_s, self._steps, self._prefilling = soon, 0, False
            return

    def _plan_prompts(self) -> bool:
        """Plan a step with prompt tokens; False if there are none to compute now."""
        config, costs = self._config, self._costs
        num = tokens = len(self._decoding)
        budget = config.step_tokens - num
        room = config.kv_tokens - self._context - self._held
        places = config.max_batch_size - num
        more: dict[str, int] = {}
        chunks: list[tuple[_Part, int]] = []
        for part in self._waiting:
            if places <= 0 or budget <= 0:
                break
            if part.ready_s > self._at:
                continue
            if part.left > room:
                break
            places -= 1
            chunk = min(part.left, budget)
            budget -= chunk
            room -= part.left
            tokens += chunk
            chunks.append((part, chunk))
            if part.adapter is not None:
                more[part.adapter] = more.get(part.adapter, 0) + chunk
        self._chunks = chunks
        if not chunks:
            return False
        lanes_s = self._lanes_s
        for adapter, count in more.items():
            before = self._lanes.get(adapter, 0)
            lanes_s += costs.lanes_s(before + count) - (costs.lanes_s(before) if before else 0.0)
        self._prefilling, self._steps = True, 1
        self.next_s = self._at + costs.merged_s(tokens, self._context) + lanes_s
        return True

    def _plan_decoding(self, most: int) -> None:
        """Plan at most `most` steps of the decoding requests, until the first of them ends or a prompt can start."""
        num = len(self._decoding)
        self._prefilling = False
        self._first_s = self._costs.merged_s(num, self._context) + self._lanes_s
        self._slope_s = self._costs.context_token_s * num
        self._steps = min(most, self._decoding[0][0] - self._count)
        self.next_s = self._at + self._series_s(self._steps)
        if num < self._config.max_batch_size:
            soon = min((part.ready_s for part in self._waiting if part.ready_s > self._at), default=IDLE_S)
            if soon < self.next_s:
                self._cut(soon)

    def _series_s(self, steps: int) -> float:
        """Seconds of the first steps of a stretch."""
        return self._first_s * steps + self._slope_s * steps * (steps - 1) / 2

    def _cut(self, now: float) -> None:
        """End the present stretch of decode steps at the first end of a step not before `now`."""
        first, slope, gone = self._first_s, self._slope_s, now - self._at
        if gone > self._series_s(self._steps):
            return
        linear = first - slope / 2
        exact = (math.sqrt(linear**2 + 2 * slope * gone) - linear) / slope if slope > 0 else gone / first
        steps = max(1, math.ceil(exact - 1e-9))
        if steps < self._steps:
            self._steps = steps
            self.next_s = self._at + self._series_s(steps)

    def _settle(self, now: float) -> None:
        """Count the decode steps of the present stretch that have ended by now; the step under way is lost."""
        if self._prefilling or not self._steps:
            return
        low, high = 0, self._steps - 1  # the last step ends at an event of its own
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._at + self._series_s(middle) <= now else (low, middle - 1)
        self._steps = low
        self.next_s = self._at + self._series_s(low)
        ended = self._end_stretch()
        assert not ended

    def _end_stretch(self) -> list[Job]:
        """Count the present stretch; return the requests that have ended."""
        took, num = self.next_s - self._at, len(self._decoding)
        if self._steps:
            self.busy_s += took
            self.batch_s += took * (num + len(self._chunks))
        self._count += self._steps
        self._context += self._steps * num
        self._computed += self._steps * num
        self._at = self.next_s
        ended: list[Job] = []
        while self._decoding and self._decoding[0][0] <= self._count:
            part = heapq.heappop(self._decoding)[2]
            self._context -= part.prompt + part.job.left - 1
            self._leave_lane(part)
            ended.append(self._finish(part))
        for part, chunk in self._chunks:
            part.left -= chunk
            self._held += chunk
            self._computed += chunk
            if part.left == 0:
                self._answer_first(part, ended)
        self._chunks, self._steps = [], 0
        return ended

    def _answer_first(self, part: _Part, ended: list[Job]) -> None:
        """A prompt is complete, which answers its first token."""
        job = part.job
        self._waiting.remove(part)
        self._held -= self._held_by(part)
        if job.first_s < 0:
            job.first_s = self._at
        if job.arrival.prefix is not None:
            self._prefixes.pop((part.adapter, job.arrival.prefix), None)
            self._prefixes[part.adapter, job.arrival.prefix] = self._computed
        if job.left == 1:
            ended.append(self._finish(part))
            return
        part.ends = self._count + job.left - 1
        heapq.heappush(self._decoding, (part.ends, next(self._numbers), part))
        self._context += part.prompt
        self._join_lane(part)

    def _finish(self, part: _Part) -> Job:
        del self._parts[part.job.need.request_id]
        part.job.answered += part.job.left
        return part.job

    # -- memory -------------------------------------------------------------------------------------------------------

    def _held_by(self, part: _Part) -> int:
        """Tokens in KV of a prompt under way; reused ones are counted when it is complete."""
        return part.prompt - part.left - part.reused

    def _take_off(self, part: _Part) -> None:
        """Free a request's memory, and set what it has answered."""
        if part in self._waiting:
            self._waiting.remove(part)
            self._held -= self._held_by(part)
            return
        self._decoding = [entry for entry in self._decoding if entry[2] is not part]
        heapq.heapify(self._decoding)
        answered = part.job.left - (part.ends - self._count)
        self._context -= part.prompt + answered - 1
        part.job.answered += answered
        self._leave_lane(part)

    def _preempt_newest(self) -> None:
        """Free the KV of the decoding request that arrived last; it is computed again when there is room."""
        part = max((entry[2] for entry in self._decoding), key=lambda each: each.job.need.arrival)
        self._take_off(part)
        part.prompt = part.left = part.job.num_tokens
        part.reused = 0
        self._waiting.appendleft(part)
        self._num_preemptions += 1

    def _release_prompts(self) -> None:
        """Free the KV of all prompts under way but the oldest."""
        for part in itertools.islice(self._waiting, 1, None):
            self._held -= self._held_by(part)
            part.left = part.prompt - part.reused

    def _reused(self, job: Job) -> int:
        """Prompt tokens that the prefix cache has: of a prefix since which less than its memory was computed."""
        arrival = job.arrival
        if arrival.prefix is None or job.answered:
            return 0
        used = self._prefixes.get((arrival.adapter, arrival.prefix))
        while self._prefixes and self._computed - next(iter(self._prefixes.values())) > self._config.kv_tokens:
            del self._prefixes[next(iter(self._prefixes))]
        if used is None or (arrival.adapter, arrival.prefix) not in self._prefixes:
            return 0
        size = self._config.block_size
        reused = min(arrival.prefix_tokens, arrival.prompt_tokens - 1) // size * size
        if job.first_s < 0:
            job.num_reused = reused
        return reused

    # -- adapters -----------------------------------------------------------------------------------------------------

    def _load(self, adapter: str | None, now: float) -> float:
        """Load an adapter if it is not on the device; return when it is usable."""
        if adapter is None:
            return 0.0
        if adapter in self._ready_s:
            self._ready_s[adapter] = self._ready_s.pop(adapter)
            return self._ready_s[adapter]
        if len(self._ready_s) >= self._config.resident_adapters:
            used = {part.adapter for part in self._parts.values()}
            unused = next((name for name in self._ready_s if name not in used), None)
            if unused is not None:
                del self._ready_s[unused]
        self._loader_free_s = max(self._loader_free_s, now) + self._config.load_s
        self._ready_s[adapter] = self._loader_free_s
        self.num_loads += 1
        return self._loader_free_s

    def _join_lane(self, part: _Part) -> None:
        if part.adapter is not None:
            before = self._lanes.get(part.adapter, 0)
            self._lanes[part.adapter] = before + 1
            self._lanes_s += self._costs.lanes_s(before + 1) - (self._costs.lanes_s(before) if before else 0.0)

    def _leave_lane(self, part: _Part) -> None:
        if part.adapter is not None:
            before = self._lanes.pop(part.adapter)
            self._lanes_s -= self._costs.lanes_s(before)
            if before > 1:
                self._lanes[part.adapter] = before - 1
                self._lanes_s += self._costs.lanes_s(before - 1)
            if not self._lanes:
                self._lanes_s = 0.0  # without the rounding errors so far
