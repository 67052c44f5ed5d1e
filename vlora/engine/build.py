"""Builds the parts of an engine: the model, its memory, the scheduler, and what is attached to the step loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import atmm
from vlora.config import EngineConfig
from vlora.engine.adapter_admin import AdapterAdmin
from vlora.engine.adapter_loader import AdapterLoader
from vlora.engine.device_runtime import DeviceRuntime, facts_of, lay_out, set_threads, use_device
from vlora.engine.grammar_cache import GrammarCache, GrammarHook
from vlora.engine.monitor import Monitor
from vlora.engine.quantize import check_device, with_stored_format
from vlora.engine.request_checks import AdapterVersions, RequestChecks
from vlora.engine.steps import StepsAhead, StepsInOrder
from vlora.engine.tensor_parallel.coordinator import (
    TensorParallelCoordinator,
    TensorParallelRunner,
    choose_sharding,
)
from vlora.engine.trainings import Trainings
from vlora.errors import BadConfig
from vlora.lora.registry import AdapterRegistry, always_replicated
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.block_manager import BlockManager, WrittenBlocks
from vlora.memory.page_allocator import PageAllocator
from vlora.memory.prefix_cache import PrefixCache
from vlora.models.grammar import GrammarCompiler
from vlora.models.hf_model import HFModel
from vlora.models.loading import device_of, load_model, read_config
from vlora.models.runner import ModelRunner
from vlora.models.sharding import plan_of, shard
from vlora.orchestrator.cost_model import CostModel, TokenThresholds
from vlora.orchestrator.latency_promise import LatencyPromise
from vlora.orchestrator.policies.base import Policy
from vlora.orchestrator.policies.registry import make_policy
from vlora.orchestrator.scheduler import Scheduler
from vlora.parallel.process_group import ProcessGroup
from vlora.types import Batch, Request, RequestOutput, StepResult

if TYPE_CHECKING:
    from vlora.engine.base_service import BaseService

_HOLD_S = 1.0
_MAX_AHEAD_S = 1.0  # of a kind that could not run for long, so that it does not stop the other one for as long

# Work of the engine between two steps, beside requests: trainings, and products for clients of the base model.


class OtherWork(Protocol):
    """Work in pieces that cannot be interrupted. All calls come from the engine's thread, between two steps.

    Attributes:
        wake: Called from any thread when `advance` may have more to do; set by the step loop.
    """

    wake: Callable[[], None]

    def advance(self) -> bool:
        """Run one piece, if there is one that the promise allows. Returns whether to call again at once if idle."""

    @property
    def retry_s(self) -> float | None:
        """How long an idle engine may sleep before `advance` may run a piece; None until `wake` is called."""


class SharedWork(OtherWork, Protocol):
    """One kind of work among others.

    Attributes:
        waits: Whether the last call of `advance` ran no piece because of the promise.
        fits_later: Of a piece that waits: whether it may run before the engine has been idle for long.
    """

    waits: bool
    fits_later: bool


class WorkByTurns:
    """Two kinds of work, an `OtherWork`. While both have pieces, the one that has had less time comes first.

    A piece that waits for room keeps the other kind from using it up, unless it cannot run beside requests at all. It
    does so for half of the time only, in every other second, because there may never be enough room for it.
    """

    def __init__(
        self, first: SharedWork, second: SharedWork, promise: LatencyPromise, clock: Callable[[], float]
    ) -> None:
        """promise: both charge it with their pieces. clock: the engine's."""
        self.wake: Callable[[], None] = lambda: None
        self._kinds = (first, second)
        self._promise = promise
        self._clock = clock
        self._ahead_s = 0.0  # time of the first kind beyond that of the second one
        first.wake = second.wake = self._wake

    def advance(self) -> bool:
        behind = int(self._ahead_s > 0)  # the index of the kind that has had less time
        for place in (behind, 1 - behind):
            kind, before_s = self._kinds[place], self._promise.spent_s
            again = kind.advance()
            ahead_s = self._ahead_s + (1, -1)[place] * (self._promise.spent_s - before_s)
            self._ahead_s = min(_MAX_AHEAD_S, max(-_MAX_AHEAD_S, ahead_s))
            if again or (kind.waits and kind.fits_later and self._clock() % (2 * _HOLD_S) < _HOLD_S):
                return again
            if place == behind and not kind.waits:
                self._ahead_s = 0.0  # it has no claim on the time in which it does nothing
        return False

    @property
    def retry_s(self) -> float | None:
        return min((kind.retry_s for kind in self._kinds if kind.retry_s is not None), default=None)

    def _wake(self) -> None:
        self.wake()


class Hooks(NamedTuple):
    """What grammars, trainings and monitoring attach to the step loop: functions, called in order.

    Attributes:
        before_schedule: Returns outputs of requests, the last ones of those that it has ended.
        on_add: Called with each admitted request, which has its adapter's name.
        on_release: Called with the id of each request that has ended, possibly more than once.
    """

    before_schedule: list[Callable[[], Iterable[RequestOutput]]]
    on_add: list[Callable[[Request], None]]
    on_release: list[Callable[[str], None]]
    on_close: list[Callable[[], None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts of an engine, for its step loop, tests and benches.

    Attributes:
        base: None if no clients are served.
        coordinator: None on a single rank.
    """

    num_threads: int
    device: DeviceRuntime
    block_manager: BlockManager
    adapter_cache: AdapterCache
    registry: AdapterRegistry
    scheduler: Scheduler
    runner: ModelRunner | TensorParallelRunner
    loader: AdapterLoader
    admin: AdapterAdmin
    checks: RequestChecks
    monitor: Monitor
    versions: AdapterVersions
    trainings: Trainings
    other_work: OtherWork
    base: BaseService | None
    steps: StepsInOrder | StepsAhead
    grammars: GrammarCache
    hooks: Hooks
    coordinator: TensorParallelCoordinator | None


def build(
    config: EngineConfig,
    *,
    model: object | None,
    clock: Callable[[], float],
    executor: Executor | None,
    policy: Policy | None,
    cost: CostModel | None,
) -> EngineParts:
    """Load the model, allocate memory and connect the parts. Raises BadConfig. The arguments are `Engine`'s."""
    if policy is None:
        policy = make_policy(config.policy)  # before the model: a wrong name fails without loading it
    num_threads = set_threads(config)
    own_device = device_of(config, 0)
    use_device(own_device)
    if model is None:
        config = with_stored_format(config)
    check_device(config, own_device)
    device_type = own_device.type
    # Kernels are built here if necessary, and further down for a GPU, so that no request waits for a build.
    environment = {
        "cpu_kernels": "" if device_type != "cpu" else "compiled" if atmm.load_kernels() else "plain torch",
        "atmm_table": atmm.describe_table(device_type),
        "num_threads": num_threads,
    }
    coordinator = _start_ranks(config, model)
    with (
        contextlib.nullcontext() if coordinator is None else coordinator.closing_on_error(),
        _listening(config) as base,
    ):
        device, block_manager, adapter_cache = _build_device(config, model, executor, coordinator)
        runner = device.runner if coordinator is None else coordinator.distribute(device.runner)
        registry = _build_registry(config, device, executor, coordinator)
        cost = cost or CostModel(token_thresholds(device.hf_model))
        scheduler = _build_scheduler(config, device, block_manager, policy, cost, clock)
        loader = AdapterLoader(
            config=config,
            scheduler=scheduler,
            registry=registry,
            device=device,
            adapter_cache=adapter_cache,
            block_manager=block_manager,
            on_retire=() if coordinator is None else (coordinator.forget_adapter,),
        )
        admin = AdapterAdmin(
            registry=registry,
            pool=device.pool,
            adapter_cache=adapter_cache,
            scheduler=scheduler,
            loader=loader,
            several_ranks=coordinator is not None,
        )
        trainings = Trainings(config=config, device=device, registry=registry, admin=admin, cost=cost, clock=clock)
        other_work: OtherWork = trainings
        if base is not None:
            served = base.start(device, trainings.promise, clock)
            other_work = WorkByTurns(trainings, served, trainings.promise, clock)
        monitor = Monitor(
            config=config,
            clock=clock,
            scheduler=scheduler,
            device=device,
            block_manager=block_manager,
            adapter_cache=adapter_cache,
            registry=registry,
            loader=loader,
            pinned=admin.pinned,
            trainings=trainings.statuses,
            served_base=dict if base is None else lambda: base.stats,
            environment={**environment, "arena_basis": device.limits.arena_basis},
        )
        compiler = GrammarCompiler(config.model, device.hf_model.lm_head.weight.shape[0], device.hf_model.eos_ids)
        grammars = GrammarCache(compiler, executor=executor)
        versions = AdapterVersions(admin.compositions, registry, scheduler)
        held = GrammarHook(grammars, scheduler, runner.begin_grammar)
        hooks = Hooks(
            before_schedule=[held.release_compiled, versions.release_read, trainings.begin_step],
            on_add=[held.add, versions.add, monitor.count_request, trainings.add_request],
            on_release=[held.release, versions.release, trainings.promise.release],
            on_close=[grammars.close, trainings.close],
        )
        if base is not None:
            hooks.on_close.insert(0, base.close)
        if coordinator is not None:
            hooks.on_close.append(coordinator.close)

        def on_step(batch: Batch, result: StepResult) -> None:
            monitor.record_step(batch, result)
            trainings.record_step(batch)

        steps: StepsInOrder | StepsAhead
        if isinstance(block_manager, WrittenBlocks) and isinstance(runner, ModelRunner):
            steps = StepsAhead(runner, scheduler, block_manager, on_step)
            hooks.before_schedule.append(steps.make_room)
            hooks.on_add.append(steps.add)
            hooks.on_release.append(steps.release)
        else:
            steps = StepsInOrder(runner, scheduler, on_step)
        if config.train is not None:
            trainings.start(config.train)
        return EngineParts(
            num_threads=num_threads,
            device=device,
            block_manager=block_manager,
            adapter_cache=adapter_cache,
            registry=registry,
            scheduler=scheduler,
            runner=runner,
            loader=loader,
            admin=admin,
            checks=RequestChecks(config, device.hf_model, device.limits, admin.compositions),
            monitor=monitor,
            versions=versions,
            trainings=trainings,
            other_work=other_work,
            base=base,
            steps=steps,
            grammars=grammars,
            hooks=hooks,
            coordinator=coordinator,
        )


def _listening(config: EngineConfig) -> contextlib.AbstractContextManager[BaseService | None]:
    """The service of the base model's layers, with its sockets, which close on an error."""
    if config.serve_base is None:
        return contextlib.nullcontext()
    from vlora.engine.base_service import listening  # an engine without clients needs no part of `vlora.split`

    return listening(config.serve_base)


def _start_ranks(config: EngineConfig, model: object | None) -> TensorParallelCoordinator | None:
    if config.tensor_parallel == 1:
        return None
    if model is not None:
        raise BadConfig("every rank loads its own model: tensor_parallel needs a folder or a hub name")
    plan_of(read_config(config.model), 0, config.tensor_parallel)  # before any rank is started
    return TensorParallelCoordinator(config)


def _build_device(
    config: EngineConfig, model: object | None, executor: Executor | None, coordinator: TensorParallelCoordinator | None
) -> tuple[DeviceRuntime, BlockManager, AdapterCache]:
    """The model and its memory: pages for KV blocks and adapters in one arena."""
    loaded = load_model(config) if model is None else model
    hf_model = HFModel(loaded)
    group: ProcessGroup | None = None
    if coordinator is not None:
        group = coordinator.join(facts_of(config, loaded), device_of(config, 0))
        shard(hf_model, group)
    layout = lay_out(config, hf_model, group, loaded=model is None)
    prefix = PrefixCache(hf_model.placeholders)
    allocator = PageAllocator(
        layout.limits.num_pages,
        layout.limits.block_pages,
        on_evict=prefix.remove,
        copy=layout.arena.copy if coordinator is None else coordinator.copy_pages(layout.arena),
    )
    adapter_cache = AdapterCache(allocator, layout.limits.max_adapter_pages)
    device = DeviceRuntime(config, layout, adapter_cache, executor=executor, group=group, others=coordinator)
    # On a GPU steps run ahead; ranks exchange the results of each step.
    manager = WrittenBlocks if hf_model.device.type == "cuda" and coordinator is None else BlockManager
    return device, manager(allocator, config.block_size, prefix if config.prefix_cache else None), adapter_cache


def _build_registry(
    config: EngineConfig,
    device: DeviceRuntime,
    executor: Executor | None,
    coordinator: TensorParallelCoordinator | None,
) -> AdapterRegistry:
    registry = AdapterRegistry(
        device.pool.sites,
        device.hf_model.dtype,
        device.hf_model.hidden_size,
        executor=executor,
        device=device.hf_model.device,
        measure=device.merge_fidelity,
        choose=always_replicated if coordinator is None else functools.partial(choose_sharding, config),
        base_layers=device.base_layers,
    )
    if coordinator is not None:
        coordinator.use_registrations(registry.known)
    return registry


def _build_scheduler(
    config: EngineConfig,
    device: DeviceRuntime,
    block_manager: BlockManager,
    policy: Policy,
    cost: CostModel,
    clock: Callable[[], float],
) -> Scheduler:
    hf_model = device.hf_model
    return Scheduler(
        policy=policy,
        block_manager=block_manager,
        max_request_blocks=device.limits.max_request_blocks,
        max_batch_size=config.max_batch_size,
        max_step_tokens=config.step_tokens,
        theta_s=config.theta_s,
        eos_ids=hf_model.eos_ids,
        cost=cost,
        clock=clock,
        weights=config.weights,
        tenant_weights=config.tenant_weights,
        placeholders=hf_model.placeholders,
        is_cached=device.vision.is_cached,
        encode_share=config.encode_share,
    )


def token_thresholds(hf_model: HFModel) -> TokenThresholds:
    thin = atmm.thin_batches(hf_model.lm_head.weight)
    short_lane = atmm.longest_short_lane(hf_model.device, hf_model.dtype)
    return TokenThresholds(short_lane, thin.hidden_tokens, thin.max_tokens)
