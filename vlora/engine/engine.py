"""One replica, synchronous: `step()` decides who runs, runs them, records what came out."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

import atmm
from vlora.adapters import AdapterRegistry, HostAdapter, SiteShape
from vlora.config import EngineConfig
from vlora.engine.limits import compute_limits
from vlora.engine.switching import originals_if_in_place
from vlora.errors import (
    Aborted,
    BadRequest,
    OverCapacity,
    PromptTooLong,
    StepFailed,
    UnknownHead,
)
from vlora.memory.arena import PAGE_BYTES, Arena, pages_for
from vlora.memory.books import ArenaBooks, BlockTables, Run
from vlora.memory.prefix import PrefixCache
from vlora.memory.residency import Residency
from vlora.models.bank import AdapterBank
from vlora.models.in_place import InPlaceSwitcher
from vlora.models.loading import load_model
from vlora.models.runner import ModelRunner
from vlora.models.seam import Seam
from vlora.models.shadow import ShadowSwitcher
from vlora.models.slabs import WeightSlabs
from vlora.models.switcher import ModeSwitcher, merge_fidelity
from vlora.models.vision import VisionEncoder
from vlora.orchestrator import CostModel, Scheduler, bring_wanted, make_policy
from vlora.types import (
    AdapterStatus,
    EngineStats,
    ErrorValue,
    HeadSummary,
    MemoryView,
    Request,
    RequestOutput,
    StepResult,
)


class Engine:
    """Scheduler, memory and model of one replica. Not thread-safe: one thread owns it.

    Inside, an adapter is known by its key (name and content version), never by its name alone: reloading a name makes
    a new version for new requests, while requests under way finish on the one they started with.
    """

    def __init__(
        self, config: EngineConfig, *, model: object | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load the model and lay out memory; `model` gives an already built transformers model. Raises BadConfig."""
        policy = make_policy(config.policy)  # before the model: a wrong name should not cost a load
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        # Kernels are built here where that is still to do, and further down for a GPU: not in the middle of a request.
        atmm.load_kernels()
        self.config = config
        self._seam = seam = Seam(load_model(config) if model is None else model)
        self._slabs = WeightSlabs(seam.language_linears)
        originals = originals_if_in_place(config, seam, self._slabs, loaded=model is None)
        self.limits = compute_limits(config, seam, self._slabs.num_bytes if originals is None else 0)
        arena = Arena(self.limits.num_pages, seam.device)
        prefix = PrefixCache(seam.placeholders)
        self._books = ArenaBooks(self.limits.num_pages, self.limits.block_pages, displaced=prefix.drop)
        self._tables = BlockTables(self._books, config.block_size, prefix if config.prefix_cache else None)
        self._residency = Residency(self._books, self.limits.max_adapter_pages)
        self._bank = AdapterBank(arena, self._residency, seam.language_linears, seam.vision_linears, self._slabs.order)
        self._bank.compile_ahead()
        self._switcher: ModeSwitcher
        if originals is None:
            self._switcher = ShadowSwitcher(self._slabs, self._bank)
        else:
            on_gpu = seam.device.type == "cuda"
            self._switcher = InPlaceSwitcher(self._slabs, self._bank, originals, subtracting=on_gpu)
        self._vision = VisionEncoder(seam, config.vision_cache_bytes)
        self._runner = ModelRunner(
            seam,
            arena,
            self._bank,
            self._switcher,
            self._vision,
            block_size=config.block_size,
            block_pages=self.limits.block_pages,
        )
        sites = {
            name: SiteShape(linear.in_features, linear.out_features, vision)
            for vision, linears in ((False, seam.language_linears), (True, seam.vision_linears))
            for name, linear in linears.items()
        }
        self._registry = AdapterRegistry(sites, seam.dtype, seam.hidden_size)
        self._scheduler = Scheduler(
            policy=policy,
            tables=self._tables,
            max_request_blocks=self.limits.max_request_blocks,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            theta_s=config.theta_s,
            eos_ids=seam.eos_ids,
            cost=CostModel(),
            clock=clock,
            in_place=self._switcher.in_place,
        )
        # Every adapter version that is current or that a request under way still uses.
        self._versions: dict[str, HostAdapter] = {}
        self._fidelity: dict[str, float] = {}
        self._users: dict[str, set[str]] = {}
        self._pinned: dict[str, Run] = {}  # by an operator, by name
        self._key_of: dict[str, str | None] = {}

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Take a request in. Raises BadRequest's subclasses, or BadAdapter, without touching anything else."""
        if request.request_id in self._key_of:
            raise BadRequest(f"request id {request.request_id!r} is already in use; ids must be unique")
        self._check_tokens(request)
        adapter = self._adapter_for(request)
        key = adapter.key if adapter else None
        inner = msgspec.structs.replace(request, adapter=key)
        self._scheduler.add(inner)
        self._runner.add(inner, key if adapter and adapter.touches_vision and request.vision else None)
        self._key_of[request.request_id] = key
        if key is not None:
            self._users.setdefault(key, set()).add(request.request_id)

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request now; its last output is returned. None when it is unknown or already finished."""
        output = self._scheduler.cancel(request_id)
        self._release(request_id)
        return output

    def step(self) -> tuple[RequestOutput, ...]:
        """Decide, run, record. Returns what became known for each request, in no particular order."""
        self._bring_adapters()
        batch = self._scheduler.schedule(self._memory_view())
        outputs = list(self._scheduler.drain_outputs())
        if batch is not None:
            try:
                result = self._runner.run(batch)
            except StepFailed as error:
                value = ErrorValue.of(error)
                result = StepResult(errors={item.request_id: value for item in batch.items})
            outputs += self._scheduler.record(batch, result)
        for output in outputs:
            if output.finished:
                self._release(output.request_id)
        return tuple(outputs)

    # -- adapters -----------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register an adapter folder, reading and checking all of it.

        Raises BadAdapter or OverCapacity, and the old content then stays; BadRequest for a pinned one.
        """
        if name in self._pinned:
            raise BadRequest(f"adapter {name!r} is pinned; unpin it before other content is loaded under its name")
        before = self._registry.get(name).key if name in self._registry else None
        adapter = self._registry.load(name, path, self._check_room)
        self._versions[adapter.key] = adapter
        with torch.no_grad():
            self._fidelity[adapter.key] = merge_fidelity(self._slabs, self._switcher, adapter.factors)
        if before is not None and before != adapter.key:
            self._retire(before)
        return self._status(adapter)

    def unload_adapter(self, name: str) -> tuple[RequestOutput, ...]:
        """Cancel the adapter's requests, free its memory and forget it. Raises UnknownAdapter."""
        adapter = self._registry.get(name)
        self.pin_adapter(name, False)
        self._registry.remove(name)
        reason = ErrorValue.of(Aborted(f"adapter {name!r} was unloaded"))
        outputs = [self._scheduler.fail(request_id, reason) for request_id in tuple(self._users.get(adapter.key, ()))]
        for output in outputs:
            if output is not None:
                self._release(output.request_id)
        self._retire(adapter.key)
        return tuple(output for output in outputs if output is not None)

    def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Bring an adapter to the device and keep it there, or let it be evicted again.

        Raises UnknownAdapter; OverCapacity when there is no room for it, or it would leave none for another adapter.
        """
        adapter = self._registry.get(name)
        if pinned and name not in self._pinned:
            in_use = self._pin_in_use()
            here = self._bank.bring(adapter)
            for key in in_use:
                self._residency.unpin(key)
            if not here:
                raise OverCapacity(
                    f"there is no room to bring adapter {name!r} now: others are in use; try again later"
                )
            run = self._residency.run(adapter.key)
            room = self._residency.room_beside((*self._pinned.values(), run))
            for other in self._registry.names:
                needed = pages_for(self._bank.num_bytes(self._registry.get(other)))
                if other != name and other not in self._pinned and needed > room:
                    raise OverCapacity(
                        f"pinning adapter {name!r} would leave {room} pages of the arena in a row, and adapter "
                        f"{other!r} needs {needed}; unpin another, or start with a larger arena_bytes"
                    )
            self._residency.pin(adapter.key)
            self._pinned[name] = run
        elif not pinned and name in self._pinned:
            self._residency.unpin(adapter.key)
            del self._pinned[name]
        return self._status(adapter)

    def adapters(self) -> tuple[AdapterStatus, ...]:
        return tuple(self._status(self._registry.get(name)) for name in self._registry.names)

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
        )

    def check_integrity(self) -> None:
        """Prove that every page is owned once. Raises AssertionError with the sum that does not add up."""
        self._books.check_integrity()
        self._tables.check_integrity()
        self._residency.check_integrity()

    def close(self) -> tuple[RequestOutput, ...]:
        """Cancel everything still running."""
        outputs = [self.cancel(request_id) for request_id in tuple(self._key_of)]
        return tuple(output for output in outputs if output is not None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_tokens(self, request: Request) -> None:
        vocab = self._seam.embed.weight.shape[0]
        wrong = next((token for token in request.prompt_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise BadRequest(f"the prompt holds token id {wrong}; this model's ids run from 0 to {vocab - 1}")
        answer = 0 if request.head is not None else request.sampling.max_tokens
        if len(request.prompt_ids) + answer > self.limits.max_context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens and may be answered with {answer}, together over "
                f"this model's context of {self.limits.max_context}; shorten the prompt or lower max_tokens"
            )
        for kind, token in (("image", self._seam.image_token_id), ("video", self._seam.video_token_id)):
            placed = request.prompt_ids.count(token) if token is not None else 0
            sent = sum(item.num_tokens for item in request.vision if item.kind == kind)
            if placed != sent:
                raise BadRequest(f"the prompt has {placed} {kind} placeholder tokens, but the {kind}s sent fill {sent}")

    def _adapter_for(self, request: Request) -> HostAdapter | None:
        if request.adapter is None:
            return None
        adapter = self._registry.get(request.adapter)
        if request.head is not None and request.head not in adapter.heads:
            raise UnknownHead(
                f"adapter {request.adapter!r} has no head {request.head!r}; "
                f"its heads: {', '.join(sorted(adapter.heads)) or 'none'}"
            )
        return adapter

    def _check_room(self, adapter: HostAdapter) -> None:
        """Raises OverCapacity when the adapter could never be brought beside those that are pinned."""
        needed, allowed = pages_for(self._bank.num_bytes(adapter)), self._residency.room_beside(self._pinned.values())
        if needed > allowed:
            raise OverCapacity(
                f"adapter {adapter.name!r} needs {needed} pages of the arena in a row, but adapters find at most "
                f"{allowed} beside {len(self._pinned)} pinned ones; unpin some, or start with a larger arena_bytes"
            )

    def _bring_adapters(self) -> None:
        bring_wanted(self._scheduler, self._residency, lambda key: self._bank.bring(self._versions[key]))
        gone = self._switcher.merged_key
        if gone is not None and gone not in self._bank.resident:
            self._switcher.forget(gone)

    def _pin_in_use(self) -> list[str]:
        """Keep what requests under way need from being evicted; the caller unpins."""
        resident = self._bank.resident
        pinned = [key for key in self._scheduler.adapters_in_use() if key in resident]
        for key in pinned:
            self._residency.pin(key)
        return pinned

    def _memory_view(self) -> MemoryView:
        resident = self._bank.resident
        floor = self.config.merge_fidelity_floor
        return MemoryView(
            resident=resident, mergeable=frozenset(key for key in resident if self._fidelity[key] >= floor)
        )

    def _release(self, request_id: str) -> None:
        self._runner.release(request_id)
        key = self._key_of.pop(request_id, None)
        if key is not None:
            self._users[key].discard(request_id)
            if not self._users[key]:
                del self._users[key]
                self._retire(key)

    def _retire(self, key: str) -> None:
        """Drop a version that is neither current nor in use."""
        name = key.rpartition("@")[0]
        current = name in self._registry and self._registry.get(name).key == key
        if current or self._users.get(key):
            return
        self._switcher.forget(key)
        self._bank.drop(key)
        self._vision.forget(key)
        self._tables.forget(key)
        self._versions.pop(key, None)
        self._fidelity.pop(key, None)

    def _status(self, adapter: HostAdapter) -> AdapterStatus:
        fidelity = self._fidelity[adapter.key]
        return AdapterStatus(
            name=adapter.name,
            version=adapter.version,
            rank=adapter.rank,
            num_bytes=self._bank.num_bytes(adapter),
            resident=adapter.key in self._bank.resident,
            mergeable=fidelity >= self.config.merge_fidelity_floor,
            merge_fidelity=fidelity,
            touches_vision=adapter.touches_vision,
            heads=tuple(
                HeadSummary(
                    name=head.spec.name,
                    task=head.spec.task,
                    labels=tuple(head.spec.labels),
                    prompt=head.spec.prompt,
                    num_frames=head.spec.num_frames,
                )
                for head in adapter.heads.values()
            ),
            pinned=adapter.name in self._pinned,
        )
