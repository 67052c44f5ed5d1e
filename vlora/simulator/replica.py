"""One simulated engine: real scheduler, bookkeeping and adapter cache over a machine model."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Set

from vlora.config import EngineConfig
from vlora.errors import DeadlineUnreachable
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.block_manager import BlockManager
from vlora.memory.page_allocator import PageAllocator
from vlora.memory.prefix_cache import PrefixCache
from vlora.orchestrator.adapter_prefetch import evict_for_kv, load_needed_adapters
from vlora.orchestrator.cost_model import CostModel, Costs
from vlora.orchestrator.policies.registry import make_policy
from vlora.orchestrator.scheduler import Scheduler
from vlora.simulator.arrivals import Arrival, Job
from vlora.simulator.machine import Clock, Machine
from vlora.simulator.measures import IDLE_S, TenantContention, Totals
from vlora.types import Batch, EngineStats, MemoryView, Request, RequestOutput, SamplingParams, VisionInput


class Loader:
    """Allocates an adapter's pages at once, as the engine does; it is usable after `load_s` seconds of copying."""

    def __init__(self, adapter_cache: AdapterCache, clock: Callable[[], float], load_s: float) -> None:
        self._adapter_cache = adapter_cache
        self._clock = clock
        self._load_s = load_s
        self._ready_s: dict[str, float] = {}  # by adapter being loaded, in order of arrival
        self._resident: frozenset[str] = frozenset()
        self.loading: frozenset[str] = frozenset()
        self.num_loads = 0

    @property
    def resident(self) -> frozenset[str]:
        """Adapters that a step may use. The same object until the set changes."""
        usable = self._adapter_cache.resident
        if not self.loading:
            return usable
        usable -= self.loading
        if usable != self._resident:
            self._resident = usable
        return self._resident

    @property
    def next_s(self) -> float | None:
        """When the next load ends; None without a running load."""
        return next(iter(self._ready_s.values()), None)

    def load(self, name: str, num_pages: int) -> bool:
        """Whether the adapter is resident or being loaded; False if it does not fit now."""
        known = name in self._adapter_cache.resident
        if self._adapter_cache.allocate(name, num_pages) is None:
            return False
        if not known:
            self.num_loads += 1
            if self._load_s > 0:
                self._adapter_cache.pin(name)
                copier_free_s = max([self._clock(), *self._ready_s.values()])
                self._ready_s[name] = copier_free_s + self._load_s
                self.loading = frozenset(self._ready_s)
        return True

    def collect(self) -> None:
        for name in [name for name, ready_s in self._ready_s.items() if ready_s <= self._clock()]:
            self._adapter_cache.unpin(name)
            del self._ready_s[name]
            self.loading = frozenset(self._ready_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaConfig(EngineConfig):
    """The resources of a replica, and the engine's settings that apply without a model.

    Attributes:
        load_s: Seconds from the allocation of an adapter's pages until a step may use it; copies run one at a time,
            concurrent with the steps.
        move_s: Seconds to move a KV block within memory, between steps. Adapters are never moved, since here every gap
            fits one.
        prefix_cache: KV of the common tokens of arrivals with the same prefix is reused.

    Raises:
        BadConfig: A value is invalid.
    """

    costs: Costs
    model: str = ""
    load_s: float = 0.0
    move_s: float = 32e-6  # measured for 16 tokens of the 0.5 B model (docs/decisions/0017)
    kv_tokens: int = dataclasses.field(default=65_536, metadata={"least": 1})
    resident_adapters: int = dataclasses.field(default=64, metadata={"least": 1})
    prefix_cache: bool = False


_NO_TIME_LEFT_S, _NO_BOUND_S = 1e-9, 1e9
_IMAGE_TOKEN = 1
_CACHED = "cached"  # content hash of images with cached embeddings


class SimulatedReplica:
    """The state of a replica that a world keeps.

    Attributes:
        name: Unique among all replicas of a world, past ones included.
        next_s: When `advance` is due; infinite without work.
        pushed_s: The time of its latest event on the world's heap.
        alive: It has not failed or been released.
        taken, ended: Requests so far, as of `Report`.
        num_reported: Adapters that it had loaded at its last report.
        busy_s, batch_s: Seconds with requests, and their sum over the requests.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.next_s = self.pushed_s = IDLE_S
        self.alive = True
        self.taken = self.ended = 0
        self.num_reported = -1
        self.busy_s = self.batch_s = 0.0

    @property
    def size(self) -> int:
        return self.taken - self.ended


class Replica(SimulatedReplica):
    """Steps through requests with the engine's scheduler; outputs are `RequestOutput`s, as of an engine.

    In a `World`, which uses the methods from `send` on, a step is computed when it begins, and its answers count when
    it ends.
    """

    def __init__(self, config: ReplicaConfig, name: str = "") -> None:
        super().__init__(name)
        self._config = config
        self._jobs: dict[str, Job] = {}
        self._sent_s: dict[str, float] = {}  # on the replica's clock
        self._pending: list[RequestOutput] = []
        self.clock = Clock()
        self._machine = Machine(self.clock, config.costs, config.move_s)
        # A page holds one adapter, or one KV block.
        num_blocks = -(-config.kv_tokens // config.block_size)
        prefix = PrefixCache({"image": _IMAGE_TOKEN})
        allocator = PageAllocator(
            config.resident_adapters + num_blocks, 1, on_evict=prefix.remove, copy=self._machine.copy
        )
        self.block_manager = BlockManager(allocator, config.block_size, prefix if config.prefix_cache else None)
        self.adapter_cache = AdapterCache(allocator, config.resident_adapters)
        self._loader = Loader(self.adapter_cache, self.clock, config.load_s)
        self.scheduler = Scheduler(
            policy=make_policy(config.policy),
            block_manager=self.block_manager,
            max_request_blocks=num_blocks,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.step_tokens,
            theta_s=config.theta_s,
            eos_ids=frozenset(),
            cost=CostModel(config.costs.thresholds),
            clock=self.clock,
            weights=config.weights,
            tenant_weights=config.tenant_weights,
            placeholders={"image": _IMAGE_TOKEN},
            is_cached=lambda key: key[0] == _CACHED,
        )
        self.contention = TenantContention()
        self._view = MemoryView(resident=frozenset(), mergeable=frozenset())

    @property
    def num_loads(self) -> int:
        return self._loader.num_loads

    def add(self, request_id: str, arrival: Arrival) -> float | None:
        """Add an arrival. Returns the rest of its bound, which counts from its own time.

        Raises PromptTooLong if it does not fit in memory even alone.
        """
        bound_s = self._config.max_ttft_s if arrival.max_ttft_s is None else arrival.max_ttft_s
        if bound_s is not None:
            # It may have arrived during a step.
            bound_s = max(bound_s - (self.clock.now - arrival.time_s), _NO_TIME_LEFT_S)
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_ids=_prompt(arrival.prompt_tokens, len(arrival.images))
                if not self._config.prefix_cache
                else _distinct_prompt(request_id, arrival),
                vision=tuple(
                    VisionInput(
                        kind="image",
                        content_hash=f"{request_id}/{place}" if num_patches else _CACHED,
                        num_tokens=1,
                        num_patches=num_patches,
                        fields={},
                    )
                    for place, num_patches in enumerate(arrival.images)
                ),
                adapter=arrival.adapter,
                head=None if arrival.answer_tokens else "head",
                sampling=_sampling(arrival.answer_tokens or 1),
                max_ttft_s=bound_s,
                priority=arrival.priority,
                tenant=arrival.tenant,
            )
        )
        self.contention.add(request_id, arrival.tenant)
        return bound_s

    def step(self) -> tuple[tuple[RequestOutput, ...], list[RequestOutput], float]:
        """Run the next step, or none if all work waits for adapter loads.

        Returns:
            The outputs of requests that ended before the step, the finished ones of the step, and when the next step
            can be decided: at the present time, or when a load ends.
        """
        batch = self.decide()
        early = self.scheduler.drain_outputs()
        for output in early:
            self.contention.remove(output.request_id)
        if batch is not None:
            return early, self.record(batch), self.clock.now
        if early:
            return early, [], self.clock.now
        load_end_s = self._loader.next_s
        assert load_end_s is not None, "at least one adapter always fits"
        return early, [], load_end_s

    def cancel(self, request_id: str) -> RequestOutput | None:
        """Cancel a request; None if it has ended."""
        output = self.scheduler.cancel(request_id)
        if output is not None:
            self.contention.remove(request_id)
        return output

    def decide(self) -> Batch | None:
        """The next step's batch; None if all work waits for adapter loads, or if all waiting requests were refused."""
        self._loader.collect()
        self.scheduler.admit(self.adapter_cache.resident)  # resident, or being loaded
        load_needed_adapters(self.scheduler.demand, self.adapter_cache, lambda name: self._loader.load(name, 1))
        evict_for_kv(self.scheduler.demand, self.adapter_cache, self._machine.merged)
        self.adapter_cache.drain_evicted()
        resident, arriving = self._loader.resident, self._loader.loading
        if resident is not self._view.resident or arriving is not self._view.loading:
            self._view = MemoryView(resident=resident, mergeable=resident, loading=arriving)
        return self.scheduler.schedule(self._view)

    def record(self, batch: Batch) -> list[RequestOutput]:
        """Advance the clock by the batch's time and record its answers. Returns finished outputs only."""
        outputs = self.scheduler.record(batch, self._machine.run(batch))
        self.contention.record_step(batch.items)
        finished = [output for output in outputs if output.finish_reason is not None]
        for output in finished:
            self.contention.remove(output.request_id)
        return finished

    def wait_until(self, time_s: float) -> None:
        self.clock.now = max(self.clock.now, time_s)

    def stats(self) -> EngineStats:
        return self.scheduler.stats("simulated")

    # -- in a world ---------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> Collection[Job]:
        return self._jobs.values()

    @property
    def adapters(self) -> Set[str]:
        """Adapters on the device or being loaded."""
        return self.adapter_cache.resident

    def send(self, job: Job, now: float) -> None:
        """A request arrives. `job.answered` tokens of its answer are computed again with the prompt.

        Raises PromptTooLong if it does not fit in memory even alone.
        """
        arrival, request_id = job.arrival, job.need.request_id
        if job.answered:
            arrival = arrival._replace(prompt_tokens=job.num_tokens, answer_tokens=job.left)
        if job.first_s >= 0:
            arrival = arrival._replace(max_ttft_s=_NO_BOUND_S)
        self.wait_until(now)
        self.add(request_id, arrival)
        self._jobs[request_id] = job
        self._sent_s[request_id] = self.clock.now
        if not self._pending:
            self.next_s = min(self.next_s, max(now, self.clock.now))

    def remove(self, job: Job, now: float) -> None:
        """Cancel a request, and set what it has answered."""
        request_id = job.need.request_id
        output = self.cancel(request_id)
        if output is None:  # its last answer is under way, and is lost
            output = next(each for each in self._pending if each.request_id == request_id)
            self._pending.remove(output)
        timings = output.timings
        assert timings is not None
        self._note_first(job, output)
        job.answered += min(timings.num_completion_tokens, job.left - 1)
        del self._jobs[request_id], self._sent_s[request_id]

    def advance(self) -> list[Job]:
        """Continue at `next_s`; return the requests that have ended at that time."""
        now = self.next_s
        ended, self._pending = self._end(self._pending, now), []
        if not self.scheduler.has_work:
            self.next_s = IDLE_S
            return ended
        self.wait_until(now)
        early, self._pending, self.next_s = self.step()
        ended += self._end(early, now)
        self.busy_s += self.next_s - now
        self.batch_s += (self.next_s - now) * len(self._jobs)
        return ended

    def free_blocks(self) -> int:
        """KV blocks that are left if each request holds its present tokens and one more block."""
        waiting = (job for job in self.jobs if not self.block_manager.table(job.need.request_id))
        needed = sum(-(-job.num_tokens // self._config.block_size) for job in waiting)
        return self.block_manager.num_free_blocks - needed - len(self._jobs)

    def totals(self) -> Totals:
        stats, waits = self.stats(), self.scheduler.waits
        return Totals(
            dict(stats.steps_by_mode),
            stats.num_switches,
            stats.switch_s,
            stats.num_preemptions,
            self.num_loads,
            self.busy_s,
            self.batch_s,
            waits.longest_s,
            waits.bound_s,
        )

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

    def _note_first(self, job: Job, output: RequestOutput) -> None:
        """Note the time of the first answer, and the prefix hits of the first life."""
        timings = output.timings
        assert timings is not None
        if job.first_s < 0 and timings.ttft_s is not None:
            job.first_s = self._sent_s[output.request_id] + timings.ttft_s
            job.num_reused = timings.num_cached_tokens


@functools.lru_cache(maxsize=4096)
def _prompt(num_tokens: int, num_images: int) -> tuple[int, ...]:
    """One token per image: the cost of encoding it does not depend on its number of tokens."""
    return (_IMAGE_TOKEN,) * num_images + (0,) * (num_tokens - num_images)


def _distinct_prompt(request_id: str, arrival: Arrival) -> tuple[int, ...]:
    """A prompt that has the tokens of its prefix in common with others, and no block after them."""
    own, images = 2 + zlib.crc32(request_id.encode()), len(arrival.images)
    common = 0 if arrival.prefix is None else min(arrival.prefix_tokens, arrival.prompt_tokens - images)
    prefix = (2 + zlib.crc32(f"prefix {arrival.prefix}".encode()),) * common
    return (*prefix, *(_IMAGE_TOKEN,) * images, *(own,) * (arrival.prompt_tokens - images - common))


@functools.lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
