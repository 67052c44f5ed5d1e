"""Adapters on the device: factors as views of arena runs, keyed by name and content version."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from typing import Protocol

import torch

import atmm
from heads import TaskHead
from vlora.lora.adapted_linear import AdaptedLinear, Siblings
from vlora.lora.host_adapter import HostAdapter
from vlora.lora.layout import HostFactors, aligned, carve
from vlora.lora.own_layers import OwnLayer
from vlora.lora.peft_target import SiteShape
from vlora.lora.weight_slabs import shared_inputs
from vlora.memory.adapter_cache import AdapterCache, WorkerAdapterCache
from vlora.memory.arena import Arena, pages_for
from vlora.memory.host_to_device import Transfer
from vlora.memory.page_allocator import PageRun
from vlora.parallel.adapter_sharding import FactorShape


@dataclasses.dataclass(frozen=True)
class _Resident:
    """merged: unsplit factors by layer, which merging reads instead of `factors` if these are split over ranks."""

    shapes: Mapping[str, FactorShape]
    dtype: torch.dtype
    merged: Mapping[str, HostFactors]
    factors: Mapping[str, HostFactors]
    heads: Mapping[str, TaskHead]

    @functools.cached_property
    def is_dense(self) -> bool:
        return all(shape.kind == "dense" and not shape.rows for shape in self.shapes.values())


class OtherRanks(Protocol):
    """The other ranks, which hold their parts of the same adapters in the same pages of their arenas."""

    def load(self, key: str, run: PageRun) -> Future[None]:
        """Load an adapter on the other ranks. The future is done when every rank has it."""
        ...

    def move(self, key: str, run: PageRun) -> None:
        """Use another run for an adapter. Its bytes were already copied there."""
        ...

    def evict(self, key: str) -> None: ...

    def pack(self, keys: tuple[str, ...], run: PageRun) -> None:
        """Create packed copies of these adapters on the other ranks."""
        ...

    def unpack(self) -> None:
        """Free the packed copies on the other ranks."""
        ...


@dataclasses.dataclass(frozen=True)
class _Load:
    """An adapter that is being loaded. copies: the copy on this rank, then the one for the other ranks."""

    adapter: HostAdapter
    factors: Mapping[str, HostFactors]
    copies: tuple[Future[None], ...]

    @property
    def done(self) -> bool:
        return all(copy.done() for copy in self.copies)

    @property
    def error(self) -> BaseException | None:
        """The error of the first failed copy, or None. All copies must be done."""
        return next((error for copy in self.copies if (error := copy.exception()) is not None), None)


class AdapterPool:
    """Loads adapters into the arena, attaches their factors to the layers, and evicts them.

    An adapter is loading first and resident afterwards. Its pages are allocated at once and stay pinned while they are
    written in the background. Steps may use the adapter when the whole copy is done.
    """

    def __init__(
        self,
        arena: Arena,
        adapter_cache: AdapterCache | WorkerAdapterCache,
        transfer: Transfer,
        language: Mapping[str, AdaptedLinear],
        vision: Mapping[str, AdaptedLinear],
        language_order: Sequence[str],
        others: OtherRanks | None = None,
        own: Mapping[str, OwnLayer] | None = None,
    ) -> None:
        self._others = others
        self._arena = arena
        self._adapter_cache = adapter_cache
        self._transfer = transfer
        self._linears = {**language, **vision}
        self._own = own or {}
        self._layers: dict[str, AdaptedLinear | OwnLayer] = {**self._linears, **self._own}
        self._order = (*language_order, *vision, *self._own)
        self._vision = vision.keys()
        self._loading: dict[str, _Load] = {}
        self._residents: dict[str, _Resident] = {}
        self._resident: frozenset[str] | None = frozenset()  # None: rebuilt at the next access
        self._groups = site_groups(language)
        self._table = self._factor_table(vision.values())
        self._packed: _Packed | None = None
        self._pack_request: tuple[tuple[str, ...], int] = ((), 0)
        self.num_loads = 0
        self._loads: Counter[str] = Counter()  # by key

    @property
    def sites(self) -> dict[str, SiteShape]:
        """The model's adaptable layers, in the order of their factors in a run."""
        shards = ((name, self._layers[name].shard) for name in self._order)
        return {
            name: SiteShape(
                shard.d_in,
                shard.d_out,
                name in self._vision,
                shard,
                own=name in self._own,
                tied=self._own[name].tied if name in self._own else None,
            )
            for name, shard in shards
        }

    @property
    def resident(self) -> frozenset[str]:
        """Adapters that a step may use. The same object is returned until an adapter is loaded or evicted."""
        if self._resident is None:
            self._resident = frozenset(self._residents)
        return self._resident

    @property
    def loading(self) -> frozenset[str]:
        return frozenset(self._loading)

    @property
    def pending(self) -> tuple[Future[None], ...]:
        copies = (copy for loading in self._loading.values() for copy in loading.copies)
        return tuple(copy for copy in copies if not copy.done())

    def _factor_table(self, vision: Iterable[AdaptedLinear]) -> atmm.FactorTable | None:
        """The places of all adapters' factors, on devices with kernels that read them in place."""
        weight = next(iter(self._linears.values())).stored
        if not atmm.reads_in_place(weight.device, weight.dtype):
            return None
        groups = [*(group.sites for group in self._groups), *((linear.site,) for linear in vision)]
        return atmm.FactorTable(groups, weight.dtype, weight.device, _NUM_SLOTS)

    def compile_ahead(self) -> None:
        """Compile the kernels of every possible step on a GPU. On a CPU nothing is compiled per shape."""
        weight = next(iter(self._linears.values())).stored
        if weight.device.type == "cuda":
            atmm.compile_ahead(self._groups, weight.dtype, weight.device)

    def load(self, adapter: HostAdapter) -> bool:
        """Start loading an adapter, evicting cold adapters if necessary.

        Returns:
            True if the adapter is resident or loading. False if it does not fit now; then nothing has changed.
        """
        key, num_pages = adapter.key, pages_for(adapter.run.nbytes)
        if key in self._residents or key in self._loading:
            self._adapter_cache.touch(key)
            return True
        run = self._adapter_cache.allocate(key, num_pages)
        if run is None and self._packed is not None and self._adapter_cache.room_without(self._packed.run) >= num_pages:
            self.unpack()
            run = self._adapter_cache.allocate(key, num_pages)
        self.detach_evicted()
        for moved in self._adapter_cache.drain_moved():
            self.relocate(moved)
        if run is None:
            return False
        self._adapter_cache.pin(key)
        self.num_loads += 1
        self._loads[key] += 1
        target = self._arena.buffer(run.first_page, run.num_pages)[: adapter.run.nbytes]
        factors = carve(target, adapter.shapes, adapter.dtype)
        copies = [self._transfer.start(adapter.run, target)]
        if self._others is not None:
            copies.append(self._others.load(key, run))
        self._loading[key] = loading = _Load(adapter, factors, tuple(copies))
        if loading.done and loading.error is None:
            self.finish_load(key)
        return True

    def loads_of(self, key: str) -> int:
        return self._loads[key]

    def detach_evicted(self) -> None:
        for evicted in self._adapter_cache.drain_evicted():
            self._detach(evicted)

    def is_copied(self, key: str) -> bool:
        """Whether the copies of a loading adapter are done, so that `finish_load` does not block."""
        return self._loading[key].done

    def finish_load(self, key: str) -> None:
        """Wait until a loading adapter is resident. If its copy failed, free its pages and raise the error."""
        loading = self._loading[key]
        wait(loading.copies)
        del self._loading[key]
        self._adapter_cache.unpin(key)
        if (error := loading.error) is not None:
            self._free_pages(key)
            raise error
        adapter, device = loading.adapter, self._arena.bytes.device
        self._attach(key, adapter.shapes, loading.factors)
        self._resident = None
        self._residents[key] = _Resident(
            adapter.shapes,
            adapter.dtype,
            adapter.merged,
            loading.factors,
            {name: head.to(device) for name, head in adapter.heads.items()},
        )

    def collect(self) -> dict[str, Exception]:
        """Make adapters with finished copies resident. Returns the errors of failed copies by key."""
        failed: dict[str, Exception] = {}
        for key in [key for key, loading in self._loading.items() if loading.done]:
            try:
                self.finish_load(key)
            except Exception as error:
                failed[key] = error
        return failed

    def evict(self, key: str) -> None:
        """Evict an adapter and free its memory. Waits for a copy that is already running. Unknown keys are ignored."""
        self._loads.pop(key, None)
        loading = self._loading.pop(key, None)
        if loading is not None:
            here, *_ = loading.copies
            if not here.cancel():
                wait((here,))
            self._adapter_cache.unpin(key)
            self._free_pages(key)
        elif key in self._residents:
            self._adapter_cache.free(key)
            self._detach(key)

    def close(self) -> None:
        self._transfer.close()

    def head(self, key: str, name: str) -> TaskHead:
        return self._residents[key].heads[name]

    def factors(self, key: str, site: str) -> HostFactors:
        return self._residents[key].factors[site]

    def unfit_for_graphs(self, keys: Set[str], merged: str | None, highest_rank: int) -> str:
        """Why captured kernels cannot compute a step with lanes of these adapters; empty if they can.

        Args:
            merged: The adapter in the weights.
            highest_rank: Of an adapter with a lane.
        """
        if merged is not None and self.has_own_layers(merged):
            return "a merged adapter changes the output head or the token embedding"
        # Others have block-diagonal or split factors, or further rows.
        if not all(self._residents[key].is_dense and not self.has_own_layers(key) for key in keys):
            return "an adapter does not consist of two dense matrices for each layer"
        if self._table is None or not self._table.serves(keys):
            return "an adapter has factors that the kernels cannot read in place"
        rank = max((self._table.ranks[key] for key in keys), default=0)
        return f"an adapter has rank {rank}, captured kernels at most {highest_rank}" if rank > highest_rank else ""

    def has_own_layers(self, key: str) -> bool:
        """Whether an adapter changes the output head or the token embedding, which are never merged."""
        return any(name in self._residents[key].shapes for name in self._own)

    def shapes(self, key: str) -> dict[str, FactorShape]:
        """Shapes of the factors that merging reads, by layer. These factors are never split over ranks."""
        resident = self._residents[key]
        return {
            name: FactorShape(shape.rank, pair.a.shape[1], pair.bt.shape[1])
            if (pair := resident.merged.get(name)) is not None
            else shape
            for name, shape in resident.shapes.items()
        }

    def stacked(self, key: str, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of neighbouring layers of equal shape as a [n, rows_a, d_in] and bt [n, rows_bt, d_out].

        The result is a view, unless the factors are split over ranks; then the unsplit factors are copied from host
        memory.
        """
        merged = self._residents[key].merged
        if names[0] in merged:
            kept = [merged[name] for name in names]
            device = self._arena.bytes.device
            return torch.stack([pair.a for pair in kept]).to(device), torch.stack([pair.bt for pair in kept]).to(device)
        pairs = [self.factors(key, name) for name in names]
        return _strided([pair.a for pair in pairs]), _strided([pair.bt for pair in pairs])

    # -- packed copies ----------------------------------------------------------------------------------------------

    def pack_for(self, keys: Iterable[str]) -> None:
        """Create packed copies of adapters that consecutive steps use together.

        Called with the keys of a step's lanes if the step benefits from a packed copy. Copying costs a large part of
        a step, so a set is packed only after it repeats a few times. A step with adapters that are all packed uses the
        existing copies.
        """
        wanted = tuple(sorted(set(keys)))
        if len(wanted) < 2 or (self._packed is not None and self._packed.serves(wanted)):
            return
        last, times = self._pack_request
        times = times + 1 if wanted == last else 1
        self._pack_request = (wanted, times)
        if times >= _STEPS_BEFORE_PACKING:
            self.unpack()
            self._pack(wanted)

    def _pack(self, keys: tuple[str, ...]) -> None:
        pages = pages_for(sum(self._packed_sizes(keys)))
        run = self._adapter_cache.reserve(pages) if pages else None
        if run is None:
            return  # no free pages: strategies that need no packed copy are used instead
        self.pack(keys, run)
        if self._others is not None:
            self._others.pack(keys, run)

    def pack(self, keys: tuple[str, ...], run: PageRun) -> None:
        """Create packed copies of resident adapters in pages that are reserved for them."""
        buffer = self._arena.buffer(run.first_page, run.num_pages)
        offset = 0
        for group, size in zip(self._groups, self._packed_sizes(keys), strict=True):
            if size:
                group.pack(keys, buffer[offset : offset + size])
            offset += size
        self._packed = _Packed(keys, run)

    def unpack(self) -> None:
        """Free the packed copies, if any."""
        if self._packed is not None:
            for group in self._groups:
                group.unpack()
            self._adapter_cache.release(self._packed.run)
            self._packed = None
            if self._others is not None:
                self._others.unpack()

    def _packed_sizes(self, keys: tuple[str, ...]) -> list[int]:
        return [aligned(group.packed_bytes(keys)) for group in self._groups]

    def relocate(self, key: str) -> None:
        """Update the views of an adapter that was moved in the arena. Its packed copy stays valid."""
        run, resident = self._adapter_cache.run(key), self._residents[key]
        buffer = self._arena.buffer(run.first_page, run.num_pages)
        factors = carve(buffer, resident.shapes, resident.dtype)
        self._residents[key] = dataclasses.replace(resident, factors=factors)
        self._attach(key, resident.shapes, factors)
        if self._others is not None:
            self._others.move(key, run)

    def _attach(self, key: str, shapes: Mapping[str, FactorShape], factors: Mapping[str, HostFactors]) -> None:
        for name, pair in factors.items():
            self._layers[name].attach(key, shapes[name], pair)
        if self._table is not None:
            self._table.put(key)

    def _free_pages(self, key: str) -> None:
        """Free the pages of an adapter that never became resident."""
        self._adapter_cache.free(key)
        if self._others is not None:
            self._others.evict(key)

    def _detach(self, key: str) -> None:
        if self._packed is not None and key in self._packed.keys:
            self.unpack()
        self._resident = None
        for name in self._residents.pop(key).factors:
            self._layers[name].detach(key)
        if self._table is not None:
            self._table.drop(key)
        if self._others is not None:
            self._others.evict(key)


_STEPS_BEFORE_PACKING = 3
_NUM_SLOTS = 1024  # 12 MiB for the layers of a 7B model; more adapters than an arena usually holds


@dataclasses.dataclass(frozen=True)
class _Packed:
    keys: tuple[str, ...]
    run: PageRun

    def serves(self, wanted: Sequence[str]) -> bool:
        """Whether all wanted adapters are packed, with few enough others that a new copy would not pay off."""
        return set(wanted) <= set(self.keys) and len(self.keys) <= 2 * len(wanted)


def site_groups(linears: Mapping[str, AdaptedLinear]) -> list[atmm.SiteGroup]:
    """The sites of adaptable layers, grouped by input tensor."""
    groups: list[atmm.SiteGroup] = []
    for names in shared_inputs(linears):
        layers = [linears[name] for name in names]
        groups.append(atmm.SiteGroup([layer.site for layer in layers]))
        if len(layers) > 1:
            Siblings(layers)
    return groups


def _strided(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else first.numel()
    for before, after in itertools.pairwise(tensors):
        assert after.storage_offset() - before.storage_offset() == step, "run layout is not uniform"
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
