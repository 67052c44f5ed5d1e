"""One replica, synchronous: `step()` schedules a batch, runs it and records the results."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any

import msgspec

import atmm
from vlora.config import EngineConfig
from vlora.engine.adapter_admin import AdapterAdmin
from vlora.engine.device_runtime import DeviceSide, facts_of, lay_out, set_threads
from vlora.engine.grammar_cache import Grammars
from vlora.engine.monitor import Observer
from vlora.engine.snapshot import EngineSnapshot
from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.coordinator import Team
from vlora.engine.ways import Ways
from vlora.errors import (
    Aborted,
    BadAdapter,
    BadConfig,
    BadRequest,
    PromptTooLong,
    StepFailed,
    UnknownHead,
    VLoraError,
)
from vlora.lora import AdapterRegistry, Registration
from vlora.lora.adapter_pool import shared_inputs
from vlora.lora.merge import merge_fidelity
from vlora.lora.registry import Choose, always_replicated
from vlora.memory.adapter_cache import Residency
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.books import ArenaBooks, BlockTables
from vlora.memory.prefix_cache import PrefixCache
from vlora.models.families import encode_patches
from vlora.models.grammar import GrammarCompiler
from vlora.models.hf_adapter import Seam
from vlora.models.loading import device_of, load_model, read_config
from vlora.models.sharding import plan_of, shard
from vlora.models.token_grids import why_no_grid
from vlora.orchestrator import CostModel, Scheduler, bring_wanted, give_way_to_kv, make_policy
from vlora.orchestrator.policies.base import Policy
from vlora.parallel import Group
from vlora.types import (
    AdapterStatus,
    EngineStats,
    ErrorValue,
    MemoryView,
    Request,
    RequestOutput,
    StepResult,
)

_LOAD_WAIT_S = 0.005  # how long a step with nothing to run waits for a load before messages are handled


class Engine:
    """Scheduler, memory and model of one replica. Not thread-safe: one thread owns it.

    Internally, an adapter is identified by its key (name and registration), never by its name alone: reloading a name
    creates a new registration for new requests, while running requests finish on their original one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: object | None = None,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
        policy: Policy | None = None,
        cost: CostModel | None = None,
    ) -> None:
        """Load the model and allocate memory. Raises BadConfig.

        Args:
            config: The configuration.
            model: A built transformers model; None loads `config.model`.
            clock: Seconds, monotonic.
            executor: Reads adapters, loads them onto the device and compiles grammars; None creates a thread for each.
            policy: Replaces the policy that `config` names.
            cost: Learns step times; None for an untrained one.
        """
        if policy is None:
            policy = make_policy(config.policy)  # before the model: a wrong name fails without loading it
        self.config = config
        self._team: Team | None = None
        try:
            self._build(policy, cost, model, clock, executor)
        except BaseException as error:
            if self._team is not None:
                # The error of a failed collective is generic; the rank that left it has reported the cause.
                cause = self._team.why(error) if isinstance(error, RuntimeError) else None
                self._team.close()
                if cause is not None:
                    raise cause from error
            raise

    def _build(
        self,
        policy: Policy,
        cost: CostModel | None,
        model: object | None,
        clock: Callable[[], float],
        executor: Executor | None,
    ) -> None:
        config = self.config
        self.num_threads = set_threads(config)
        # Kernels are built here if necessary, and further down for a GPU, so that no request waits for a build.
        device = device_of(config, 0).type
        self._cpu_kernels = "" if device != "cpu" else "compiled" if atmm.load_kernels() else "plain torch"
        self._atmm_table = atmm.describe_table(device)
        group: Group | None = None
        if config.tensor_parallel == 1:
            self._seam = seam = Seam(load_model(config) if model is None else model)
        else:
            if model is not None:
                raise BadConfig("every rank loads its own model: tensor_parallel needs a folder or a hub name")
            plan_of(read_config(config.model), 0, config.tensor_parallel)  # before any rank is started
            self._team = Team(config)
            loaded = load_model(config)
            self._seam = seam = Seam(loaded)
            group = self._team.meet(facts_of(config, loaded), device_of(config, 0))
            shard(seam, group)
        layout = lay_out(config, seam, group, loaded=model is None)
        self._slabs, self.limits = layout.slabs, layout.limits
        self._arena = layout.arena
        copy = layout.arena.copy if self._team is None else self._team.copying(layout.arena)
        prefix = PrefixCache(seam.placeholders)
        self._books = ArenaBooks(self.limits.num_pages, self.limits.block_pages, displaced=prefix.drop, copy=copy)
        self._tables = BlockTables(self._books, config.block_size, prefix if config.prefix_cache else None)
        self._residency = Residency(self._books, self.limits.max_adapter_pages)
        others = self._team.bringing(lambda key: self._registry.known(key)) if self._team is not None else None
        side = DeviceSide(config, layout, self._residency, executor=executor, group=group, others=others)
        self._bank, self._switcher, self._vision = side.bank, side.switcher, side.vision
        self._runner = side.runner if self._team is None else self._team.begin(side.runner)
        ways: Choose = always_replicated
        if layout.costs is not None:
            groups = {name: names[0] for names in shared_inputs(seam.language_linears) for name in names}
            ways = Ways(config, self._bank.sites, groups, seam.dtype, layout.costs)
        self._registry = AdapterRegistry(
            self._bank.sites,
            seam.dtype,
            seam.hidden_size,
            executor=executor,
            measure=functools.partial(merge_fidelity, self._slabs, self._switcher),
            choose=ways,
        )
        self._grammars = Grammars(
            GrammarCompiler(config.model, seam.lm_head.weight.shape[0], seam.eos_ids), executor=executor
        )
        self._scheduler = Scheduler(
            policy=policy,
            tables=self._tables,
            max_request_blocks=self.limits.max_request_blocks,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            theta_s=config.theta_s,
            eos_ids=seam.eos_ids,
            cost=cost or CostModel(atmm.longest_short_lane(seam.device, seam.dtype)),
            clock=clock,
            weights=config.weights,
            tenant_weights=config.tenant_weights,
            placeholders=seam.placeholders,
            is_cached=self._vision.is_cached,
            encode_share=config.encode_share,
        )
        self._users: dict[str, set[str]] = {}  # running requests by the key of their adapter
        self._key_of: dict[str, str | None] = {}
        self._view = MemoryView(resident=frozenset(), mergeable=frozenset())
        self._num_hits = self._num_misses = 0
        self._num_load_waits = 0
        self._load_wait_s = 0.0
        self._admin = AdapterAdmin(
            registry=self._registry,
            bank=self._bank,
            residency=self._residency,
            scheduler=self._scheduler,
            retire=self._retire,
            is_mergeable=self._is_mergeable,
            several_ranks=self._team is not None,
        )
        self._observer = Observer(
            config,
            clock,
            scheduler=self._scheduler,
            books=self._books,
            residency=self._residency,
            bank=self._bank,
            registry=self._registry,
            switcher=self._switcher,
            users=self._users,
            pinned=self._admin.pinned,
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._admin.has_work

    @property
    def alarm(self) -> int | None:
        """A file descriptor that becomes readable when another rank dies; None without other ranks."""
        return None if self._team is None else self._team.alarm

    def check_ranks(self) -> None:
        """Raises EngineDead if another rank is dead."""
        if self._team is not None:
            self._team.check()

    def add(self, request: Request) -> None:
        """Admit a request. Raises subclasses of BadRequest, or BadAdapter, and then changes no state."""
        if request.request_id in self._key_of:
            raise BadRequest(f"request id {request.request_id!r} is already in use; ids must be unique")
        self._check_tokens(request)
        adapter = self._adapter_for(request)
        key = adapter.key if adapter else None
        bound_s = self.config.max_ttft_s if request.max_ttft_s is None else request.max_ttft_s
        inner = msgspec.structs.replace(
            request,
            adapter=key,
            max_ttft_s=bound_s,
            read_from=self._read_from(request, adapter),
            vision=tuple(
                msgspec.structs.replace(item, num_patches=encode_patches(self._seam.config, item))
                for item in request.vision
            ),
        )
        vision_key = key if adapter and adapter.header.touches_vision and request.vision else None
        grammar = request.sampling.grammar if request.head is None else None
        self._scheduler.add(inner, held=grammar is not None, vision_key=vision_key)
        self._runner.add(inner, vision_key)
        self._key_of[request.request_id] = key
        if grammar is not None:
            self._grammars.wait_for(request.request_id, grammar)
        if key is not None:
            self._users.setdefault(key, set()).add(request.request_id)
            self._num_hits += key in self._bank.resident
            self._num_misses += key not in self._bank.resident
        self._observer.asked(request.adapter)

    def cancel(self, request_id: str) -> RequestOutput | None:
        """Cancel a request and return its last output; None if it is unknown or already finished."""
        output = self._scheduler.cancel(request_id)
        self._release(request_id)
        return output

    def step(self) -> tuple[RequestOutput, ...]:
        """Schedule, run, record. Returns the new output of each request, in no particular order.

        Raises EngineDead if another rank is dead, or if a step on several ranks failed.
        """
        self.check_ranks()
        outputs = [*self._collect_loads(), *self._collect_grammars()]
        self._scheduler.admit(self._bank.resident | self._loading())
        self._bring_adapters()
        batch = self._scheduler.schedule(self._memory_view())
        outputs += self._scheduler.drain_outputs()
        if batch is None and not outputs:
            self._wait_for_load()
        if batch is not None:
            try:
                result = self._runner.run(batch)
            except StepFailed as error:
                value = ErrorValue.of(error)
                result = StepResult(errors={item.request_id: value for item in batch.items})
            self._observer.ran(batch, result, len(self._key_of))
            outputs += self._scheduler.record(batch, result)
        for output in outputs:
            if output.finished:
                self._release(output.request_id)
        return tuple(outputs)

    # -- adapters -----------------------------------------------------------------------------------------------------

    def register_adapters(self, paths: Mapping[str, str]) -> None:
        """Register adapter folders by name, all or none, reading only their headers: thousands in seconds.

        The factors are read in the background when a request first needs them; non-finite values then fail the
        adapter's requests with BadAdapter. Raises BadAdapter, OverCapacity, or BadRequest for a pinned name.
        """
        self._admin.register(paths)

    def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register an adapter folder, reading and checking all of it before returning.

        Raises BadAdapter or OverCapacity, or BadRequest for a pinned name; the previous content then stays.
        """
        return self._admin.load(name, path)

    def load_in_background(self, name: str, path: str) -> Future[AdapterStatus]:
        """As `load_adapter`, but the folder is read in the background; a later step sets the result or the exception.

        Until then the name keeps its previous content. Calls that read files take effect in call order; unloading the
        name in between ends this one with Aborted.
        """
        return self._admin.load_in_background(name, path)

    def unload_adapter(self, name: str, drain: bool = False) -> tuple[RequestOutput, ...]:
        """Remove an adapter: its name is free at once. Raises UnknownAdapter.

        Its requests are cancelled and its memory is freed before this returns. With `drain`, running requests finish,
        and the last one frees the memory. A pending load or pin of the name is aborted.
        """
        key = self._admin.unload(name)
        if key is None:
            return ()
        outputs = () if drain else self._fail_users(key, Aborted(f"adapter {name!r} was unloaded"))
        self._retire(key)
        return outputs

    def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Load an adapter onto the device before returning and keep it resident, or allow it to be evicted again.

        Raises UnknownAdapter, BadAdapter if reading it fails, and OverCapacity if there is no room for it or another
        adapter would no longer fit.
        """
        return self._admin.pin(name) if pinned else self._admin.unpin(name)

    def pin_in_background(self, name: str) -> Future[AdapterStatus]:
        """As `pin_adapter` with pinned=True, but in the background; a later step sets the result or the exception.

        It takes effect after all earlier loads; unpinning or unloading in between ends it with Aborted.
        """
        return self._admin.pin_in_background(name)

    def adapters(self, after: str = "", most: int | None = None) -> tuple[AdapterStatus, ...]:
        """Statuses in order of name: at most `most` of those after `after`."""
        return self._admin.statuses(after, most)

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self._scheduler.stats(self.config.model),
            arena_bytes=self._books.num_pages * PAGE_BYTES,
            kv_bytes=len(self._books.taken_blocks) * self.limits.block_pages * PAGE_BYTES,
            cached_kv_bytes=self._tables.num_cached_blocks * self.limits.block_pages * PAGE_BYTES,
            adapter_bytes=self._residency.num_pages * PAGE_BYTES,
            num_adapters=len(self._registry.names),
            num_resident_adapters=len(self._bank.resident),
            num_vision_hits=self._vision.num_hits,
            num_vision_encoded=self._vision.num_encoded,
            vision_cache_bytes=self._vision.num_bytes,
            host_adapter_bytes=self._registry.num_bytes,
            relocated_bytes=self._arena.num_copied * PAGE_BYTES,
            num_adapter_loads=self._bank.num_loads,
            num_adapter_hits=self._num_hits,
            num_adapter_misses=self._num_misses,
            num_load_waits=self._num_load_waits,
            load_wait_s=self._load_wait_s,
            arena_basis=self.limits.arena_basis,
            atmm_table=self._atmm_table,
            cpu_kernels=self._cpu_kernels,
            num_threads=self.num_threads,
        )

    def snapshot(self, since: int = 0) -> EngineSnapshot:
        """The engine's current state, with the steps after number `since`."""
        return self._observer.snapshot(since, self.stats())

    def check_integrity(self) -> None:
        """Check that every page has one owner. Raises AssertionError with the sum that does not match."""
        self._books.check_integrity()
        self._tables.check_integrity()
        self._residency.check_integrity()

    def close(self) -> tuple[RequestOutput, ...]:
        """Cancel all running requests, and stop loading adapters."""
        outputs = [self.cancel(request_id) for request_id in tuple(self._key_of)]
        self._admin.close()
        self._registry.close()
        self._bank.close()
        self._grammars.close()
        if self._team is not None:
            self._team.close()
            self._team = None
        return tuple(output for output in outputs if output is not None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_tokens(self, request: Request) -> None:
        vocab = self._seam.embed.weight.shape[0]
        wrong = next((token for token in request.prompt_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise BadRequest(f"the prompt contains token id {wrong}; this model's ids run from 0 to {vocab - 1}")
        biased = next((token for token, _ in request.sampling.logit_bias if not 0 <= token < vocab), None)
        if biased is not None:
            raise BadRequest(
                f"logit_bias has token id {biased}; this model's ids run from 0 to {vocab - 1}", field="logit_bias"
            )
        answer = 0 if request.head is not None else request.sampling.max_tokens
        if len(request.prompt_ids) + answer > self.limits.max_context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens and up to {answer} output tokens are requested, "
                f"over this model's context of {self.limits.max_context}; shorten the prompt or lower max_tokens"
            )
        for kind, token in (("image", self._seam.image_token_id), ("video", self._seam.video_token_id)):
            placed = request.prompt_ids.count(token) if token is not None else 0
            sent = sum(item.num_tokens for item in request.vision if item.kind == kind)
            if placed != sent:
                raise BadRequest(f"the prompt has {placed} {kind} placeholder tokens, but its {kind}s need {sent}")

    def _adapter_for(self, request: Request) -> Registration | None:
        if request.adapter is None:
            return None
        adapter = self._registry.get(request.adapter)
        if adapter.error is not None:
            raise BadAdapter(adapter.error)
        heads = adapter.header.heads
        if request.head is not None and request.head not in heads:
            raise UnknownHead(
                f"adapter {request.adapter!r} has no head {request.head!r}; its heads: "
                f"{', '.join(sorted(heads)) or 'none'}"
            )
        return adapter

    def _read_from(self, request: Request, adapter: Registration | None) -> int | None:
        """The index of the first token that a head over image tokens reads. Raises BadRequest if there is none."""
        if adapter is None or request.head is None or not adapter.header.heads[request.head].task.reads_images:
            return None
        name = f"head {request.head!r} of adapter {request.adapter!r}"
        reason = why_no_grid(self._seam.config)
        if reason is not None:
            raise BadRequest(f"{name} reads image tokens as a grid, and {reason}; use a head over the whole image")
        if not request.vision:
            raise BadRequest(f"{name} reads image tokens; the request has no image")
        placeholders = set(self._seam.placeholders.values())
        return next(place for place, token in enumerate(request.prompt_ids) if token in placeholders)

    def _collect_loads(self) -> list[RequestOutput]:
        """Collect adapters that were read or loaded, and return the last outputs of requests of failed adapters."""
        self._admin.poll()
        outputs: list[RequestOutput] = []
        for bad in self._registry.collect():
            outputs += self._fail_users(bad.key, BadAdapter(bad.error or ""))
        for key, error in self._bank.collect().items():
            outputs += self._fail_users(key, StepFailed(f"its adapter could not be loaded onto the device: {error}"))
        return outputs

    def _collect_grammars(self) -> list[RequestOutput]:
        """Release requests with a compiled grammar; return the last outputs of those with an invalid one."""
        outputs: list[RequestOutput] = []
        for request_id, found in self._grammars.collect():
            if isinstance(found, VLoraError):
                output = self._scheduler.fail(request_id, ErrorValue.of(found))
                outputs += [] if output is None else [output]
            else:
                self._runner.begin_grammar(request_id, found.begin())
                self._scheduler.release(request_id)
        return outputs

    def _bring_adapters(self) -> None:
        bring_wanted(self._scheduler, self._residency, self._bring)
        give_way_to_kv(self._scheduler, self._residency, self._switcher.merged_key)
        self._bank.forget_evicted()
        for key in self._scheduler.adapters_outside():
            self._registry.fetch(key)  # into host memory only: their requests are not admitted yet
        gone = self._switcher.merged_key
        if gone is not None and gone not in self._bank.resident:
            self._switcher.forget(gone)

    def _bring(self, key: str) -> bool:
        adapter = self._registry.fetch(key)
        return adapter is not None and self._bank.bring(adapter)

    def _wait_for_load(self) -> None:
        """Nothing can run before an adapter or grammar is ready: yield the CPU to its thread for a short time."""
        pending: tuple[Future[Any], ...] = (*self._registry.pending, *self._bank.pending, *self._grammars.pending)
        if not self._scheduler.has_work:
            wait((*pending, *self._admin.pending), _LOAD_WAIT_S, FIRST_COMPLETED)
        elif pending:
            started = time.perf_counter()
            wait(pending, _LOAD_WAIT_S, FIRST_COMPLETED)
            self._num_load_waits += 1
            self._load_wait_s += time.perf_counter() - started

    def _fail_users(self, key: str, error: VLoraError) -> tuple[RequestOutput, ...]:
        """End all requests of an adapter with an error."""
        value = ErrorValue.of(error)
        failed = [self._scheduler.fail(request_id, value) for request_id in tuple(self._users.get(key, ()))]
        outputs = tuple(output for output in failed if output is not None)
        for output in outputs:
            self._release(output.request_id)
        return outputs

    def _memory_view(self) -> MemoryView:
        resident, before = self._bank.resident, self._view
        mergeable = before.mergeable
        if resident is not before.resident:  # computed in every step, over possibly thousands of adapters
            mergeable = (mergeable & resident).union(filter(self._is_mergeable, resident - before.resident))
        self._view = MemoryView(resident=resident, mergeable=mergeable, loading=self._loading())
        return self._view

    def _loading(self) -> frozenset[str]:
        """Needed adapters that are being loaded onto the device or still have to be read."""
        arriving = self._bank.arriving
        return frozenset(
            key
            for key in self._scheduler.needed_adapters - self._bank.resident
            if key in arriving or self._registry.known(key).adapter is None
        )

    def _is_mergeable(self, key: str) -> bool:
        adapter = self._registry.known(key).adapter
        return adapter is not None and adapter.merge_fidelity >= self.config.merge_fidelity_floor

    def _release(self, request_id: str) -> None:
        self._runner.release(request_id)
        self._grammars.forget(request_id)
        key = self._key_of.pop(request_id, None)
        if key is not None:
            self._users[key].discard(request_id)
            if not self._users[key]:
                del self._users[key]
                self._retire(key)

    def _retire(self, key: str | None) -> None:
        """Drop a registration unless a name maps to it or a request uses it."""
        if key is None or self._registry.is_current(key) or self._users.get(key):
            return
        self._switcher.forget(key)
        self._bank.drop(key)
        self._vision.forget(key)
        self._tables.forget(key)
        self._registry.forget(key)
        if self._team is not None:
            self._team.tell(messages.Forget(key))
