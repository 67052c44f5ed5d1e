"""A simulated engine that checks every step and every answer: for tests of schedulers and policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tests.orchestrator.checked_machine import CheckedMachine
from tests.orchestrator.sample_requests import EOS, IMAGE_TOKEN
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.block_manager import BlockManager
from vlora.memory.page_allocator import PageAllocator
from vlora.memory.prefix_cache import PrefixCache
from vlora.orchestrator.adapter_prefetch import evict_for_kv, load_needed_adapters
from vlora.orchestrator.cost_model import CostModel, Costs
from vlora.orchestrator.policies.algorithm1 import Algorithm1
from vlora.orchestrator.policies.base import Candidate, Decision, Policy, PolicyState
from vlora.orchestrator.policies.registry import make_policy
from vlora.orchestrator.scheduler import Scheduler
from vlora.simulator.machine import Clock
from vlora.simulator.replica import Loader
from vlora.types import Batch, EngineStats, MemoryView, Mode, Request, RequestOutput

SMALL_COSTS = Costs(
    base_s=0.01,
    token_s=0.001,
    lane_s=0.0005,
    long_lane_s=0.0005,
    context_token_s=0.00001,
    merge_s=0.02,
    short_lane=4,
    patch_s=0.0005,
)
SECONDS = Costs(base_s=1.0, merge_s=0.5, patch_s=0.0005)
"""A second per step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedReplicaConfig:
    """The memory, costs and settings of a checked replica, most of them as in `EngineConfig`.

    adapters: number of pages by name. lossy: those that may not be merged. weights, tenant_weights: fair shares.
    """

    num_pages: int = 256
    pages_per_block: int = 1
    block_size: int = 4
    max_adapter_pages: int = 32
    max_batch_size: int = 8
    max_step_tokens: int = 64
    theta_s: float = 0.2
    adapters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lossy: frozenset[str] = frozenset()
    load_s: float = 0.0
    costs: Costs = SMALL_COSTS
    prefix_cache: bool = False
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CheckedStep:
    """One step. `ready`: ids of the requests that the policy could select; theta_s: its theta."""

    start_s: float
    end_s: float
    theta_s: float
    ready: tuple[str, ...]
    batch: Batch

    @property
    def num_ready(self) -> int:
        return len(self.ready)


class RecordingPolicy:
    """A policy that records the inputs of another."""

    def __init__(self, policy: Policy) -> None:
        self.theta_s = 0.0
        self.credits: dict[str, float] = {}
        self._policy = policy

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        self.theta_s = state.theta_s
        self.credits = {candidate.request_id: candidate.credit for candidate in ready}
        return self._policy.decide(ready, state)


class CheckedReplica:
    """Runs requests as the engine does: load adapters, schedule, run, record.

    Asserts after every step that it could be computed (`CheckedMachine`), that the batch is within its limits, and that
    the bookkeeping of memory and requests is consistent.

    Attributes:
        policy: the policy, with the inputs of its last decision.
        log: all steps.
        outputs: outputs by request id.
        num_copied: pages moved within the arena.
    """

    def __init__(
        self, config: CheckedReplicaConfig, *, policy: Policy | None = None, failing: Mapping[str, int] | None = None
    ) -> None:
        """`policy`: the default is Algorithm 1. `failing`: by request id, the number of its step that fails."""
        self.config = config
        self.num_copied = 0
        self.clock = Clock()
        prefix = PrefixCache({"image": IMAGE_TOKEN})
        self.allocator = PageAllocator(
            config.num_pages, config.pages_per_block, on_evict=prefix.remove, copy=self._copy
        )
        self.block_manager = BlockManager(self.allocator, config.block_size, prefix if config.prefix_cache else None)
        self.adapter_cache = AdapterCache(self.allocator, config.max_adapter_pages)
        self.loader = Loader(self.adapter_cache, self.clock, config.load_s)
        self.policy = RecordingPolicy(policy or Algorithm1())
        self.machine = CheckedMachine(
            self.clock, config.costs, config.block_size, failing or {}, sharing=config.prefix_cache
        )
        self.scheduler = Scheduler(
            policy=self.policy,
            block_manager=self.block_manager,
            max_request_blocks=self.allocator.num_blocks - -(-config.max_adapter_pages // config.pages_per_block),
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            theta_s=config.theta_s,
            eos_ids=frozenset({EOS}),
            cost=CostModel(config.costs.thresholds),
            clock=self.clock,
            weights=config.weights,
            tenant_weights=config.tenant_weights,
            placeholders={"image": IMAGE_TOKEN},
            is_cached=lambda key: key[0] in self.machine.cached,
        )
        self.log: list[CheckedStep] = []
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, *requests: Request, vision_key: str | None = None) -> None:
        """Add requests. vision_key: see `Scheduler.add`."""
        for request in requests:
            self.scheduler.add(request, vision_key=vision_key)
            self.machine.add(request)
            self.outputs[request.request_id] = []

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it has not ended."""
        output = self.scheduler.cancel(request_id)
        if output is not None:
            self.outputs[request_id].append(output)

    def step(self) -> Batch | None:
        """Run one step; None if nothing could be computed, in which case the clock advances to the next load's end."""
        self.scheduler.admit(self.loader.resident | self.loader.loading)
        self._load_adapters()
        resident, loading = self.loader.resident, self.loader.loading
        mergeable = resident - self.config.lossy
        start_s = self.clock.now
        batch = self.scheduler.schedule(MemoryView(resident=resident, mergeable=mergeable, loading=loading))
        outputs = list(self.scheduler.drain_outputs())
        self.check_integrity()
        if batch is not None:
            assert len(batch.items) <= self.config.max_batch_size
            assert batch.num_tokens <= self.config.max_step_tokens
            assert batch.merged_adapter is None or batch.merged_adapter in mergeable
            outputs += self.scheduler.record(batch, self.machine.run(batch))
            self.check_integrity()
            assert {item.adapter for item in batch.items} <= resident | {None}
            self.log.append(
                CheckedStep(start_s, self.clock.now, self.policy.theta_s, tuple(self.policy.credits), batch)
            )
        elif self.loader.next_s is not None:
            self.clock.now = self.loader.next_s
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return batch

    def run(
        self,
        arrivals: Sequence[tuple[float, Request]] = (),
        *,
        cancels: Sequence[tuple[int, str]] = (),
        max_steps: int = 5000,
    ) -> None:
        """Run until no work is left.

        Args:
            arrivals: (seconds, request), in order of time.
            cancels: (number of the step before which to cancel, request id).
            max_steps: steps after which the run fails.
        """
        waiting = list(arrivals)
        for step in range(max_steps):
            while waiting and waiting[0][0] <= self.clock.now:
                self.add(waiting.pop(0)[1])
            for when, request_id in cancels:
                if when == step:
                    self.cancel(request_id)
            if not self.scheduler.has_work:
                if not waiting:
                    return
                self.clock.now = waiting[0][0]
            else:
                self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def step_with(self, resident: str = "", loading: str = "") -> Batch:
        """Run a step with given adapters in memory, whether or not they are in the cache, and without its checks."""
        view = MemoryView(resident=frozenset(resident), mergeable=frozenset(resident), loading=frozenset(loading))
        batch = self.scheduler.schedule(view)
        assert batch is not None
        self.scheduler.record(batch, self.machine.run(batch))
        return batch

    def last(self, request_id: str) -> RequestOutput:
        return self.outputs[request_id][-1]

    def end(self, request_id: str) -> str | None:
        """The finish reason of a request, or its error code; None while unfinished."""
        outputs = self.outputs[request_id]
        if not outputs or not outputs[-1].finished:
            return None
        error = outputs[-1].error
        return outputs[-1].finish_reason if error is None else error.code

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def first_answer_s(self, request_id: str) -> float:
        timings = self.last(request_id).timings
        assert timings is not None and timings.ttft_s is not None
        return timings.ttft_s

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats("simulated")

    def check_integrity(self) -> None:
        """Assert the invariants of memory and requests."""
        self.allocator.check_integrity()
        self.block_manager.check_integrity()
        self.adapter_cache.check_integrity()
        self.scheduler.check_integrity()

    def _copy(self, first_page: int, target: int, num_pages: int) -> None:
        """Move the content of a KV block with its pages; adapter content is not simulated."""
        size = self.config.pages_per_block
        self.num_copied += num_pages
        if num_pages == size and first_page % size == target % size == 0:
            self.machine.move_block(first_page // size, target // size)

    def _load_adapters(self) -> None:
        pages, demand = self.config.adapters, self.scheduler.demand
        self.loader.collect()
        load_needed_adapters(demand, self.adapter_cache, lambda name: self.loader.load(name, pages[name]))
        evict_for_kv(demand, self.adapter_cache, self.machine.merged)
        self.adapter_cache.drain_evicted()


class Script:
    """A policy that selects given requests per step, unmerged; after its last line, all in order of arrival."""

    def __init__(self, *orders: str) -> None:
        self.orders = [tuple(order) for order in orders]
        self.seen: list[tuple[tuple[Candidate, ...], PolicyState]] = []

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        self.seen.append((tuple(ready), state))
        order = self.orders.pop(0) if self.orders else tuple(c.request_id for c in ready)
        return Decision(Mode.UNMERGED, None, order[: state.max_batch_size])


def box(
    policy: Policy | str | None = None, failing: Mapping[str, int] | None = None, **settings: Any
) -> CheckedReplica:
    """One second per step, one page per block of four tokens. A policy's name: with all adapters resident."""
    config = CheckedReplicaConfig(**{"adapters": {"a": 2, "b": 2}, "costs": SECONDS, "theta_s": 10.0, **settings})
    if not isinstance(policy, str):
        return CheckedReplica(config, policy=policy, failing=failing)
    return all_resident(config, policy, pinned=False)


def all_resident(config: CheckedReplicaConfig, policy: str, *, pinned: bool = True) -> CheckedReplica:
    """All adapters resident from the start, so that every request is always ready."""
    simulation = CheckedReplica(config, policy=make_policy(policy))
    for name, pages in config.adapters.items():
        assert simulation.adapter_cache.allocate(name, pages) is not None
        if pinned:
            simulation.adapter_cache.pin(name)
    return simulation


def tight(policy: Policy, num_blocks: int, **settings: Any) -> CheckedReplica:
    """No adapters; `num_blocks` blocks of four tokens. For tests with the fixture `no_kv_admission`."""
    return box(policy, num_pages=num_blocks, max_adapter_pages=0, **settings)


def shares(batch: Batch | None) -> dict[str, tuple[int, int]]:
    """The tokens that run, by request."""
    assert batch is not None
    return {item.request_id: (item.start, item.start + item.num_tokens) for item in batch.items}
