"""Adapters on the device: factors as views of arena runs, keyed by name and content version."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

import atmm
from heads import TaskHead
from vlora.adapters import HostAdapter
from vlora.memory.arena import Arena, aligned, pages_for
from vlora.memory.books import Run
from vlora.memory.residency import Residency
from vlora.models.adapted import AdaptedLinear, Siblings


@dataclasses.dataclass(frozen=True)
class _Resident:
    factors: Mapping[str, atmm.Factors]
    heads: Mapping[str, TaskHead]


class AdapterBank:
    """Brings adapters into the arena, hands their factors to the sites, and takes them away again.

    A run holds first every layer's A, then every layer's Bt, in slab order, each tensor at a 256-byte boundary:
    neighbouring layers of one rank are then one strided view [layers, rank, dim], which merging reads in one call.
    """

    def __init__(
        self,
        arena: Arena,
        residency: Residency,
        language: Mapping[str, AdaptedLinear],
        vision: Mapping[str, AdaptedLinear],
        language_order: Sequence[str],
    ) -> None:
        self._arena = arena
        self._residency = residency
        self._linears = {**language, **vision}
        self._order = (*language_order, *vision)
        self._residents: dict[str, _Resident] = {}
        self._groups = site_groups(language)
        self._packed: _Packed | None = None
        self._waiting_to_pack: tuple[tuple[str, ...], int] = ((), 0)

    @property
    def resident(self) -> frozenset[str]:
        return frozenset(self._residents)

    def compile_ahead(self) -> None:
        """On a GPU: have the kernels of any step ready. On a CPU nothing is compiled per shape."""
        weight = next(iter(self._linears.values())).weight
        if weight.device.type == "cuda":
            atmm.compile_ahead(self._groups, weight.dtype, weight.device)

    @staticmethod
    def num_bytes(adapter: HostAdapter) -> int:
        """Bytes the adapter takes in the arena."""
        return sum(aligned(t.numel() * t.element_size()) for pair in adapter.factors.values() for t in pair)

    def bring(self, adapter: HostAdapter) -> bool:
        """Make an adapter resident, evicting cold ones if it must. False when it cannot fit now."""
        if adapter.key in self._residents:
            self._residency.touch(adapter.key)
            return True
        run = self._residency.bring(adapter.key, pages_for(self.num_bytes(adapter)))
        if run is None and self._packed is not None:
            self._unpack()
            run = self._residency.bring(adapter.key, pages_for(self.num_bytes(adapter)))
        for evicted in self._residency.drain_evicted():
            self._forget(evicted)
        if run is None:
            return False
        buffer = self._arena.buffer(run.first_page, run.num_pages)
        names = [name for name in self._order if name in adapter.factors]
        views: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        offset = 0
        for side in (0, 1):
            for name in names:
                source = adapter.factors[name][side]
                view = Arena.carve(buffer, offset, source.shape, source.dtype)
                view.copy_(source)
                views[name].append(view)
                offset += aligned(source.numel() * source.element_size())
        factors = {name: atmm.Factors(*views[name]) for name in names}
        for name, pair in factors.items():
            self._linears[name].site.factors[adapter.key] = pair
        device = self._arena.bytes.device
        self._residents[adapter.key] = _Resident(
            factors, {name: head.to(device) for name, head in adapter.heads.items()}
        )
        return True

    def drop(self, key: str) -> None:
        """Forget an adapter and free its memory; unknown keys are ignored."""
        if key in self._residents:
            self._residency.drop(key)
            self._forget(key)

    def head(self, key: str, name: str) -> TaskHead:
        return self._residents[key].heads[name]

    def factors(self, key: str, site: str) -> atmm.Factors:
        return self._residents[key].factors[site]

    def ranks(self, key: str) -> dict[str, int]:
        """Rank by adapted layer."""
        return {name: pair.a.shape[0] for name, pair in self._residents[key].factors.items()}

    def stacked(self, key: str, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of neighbouring layers of equal rank as a [n, r, d_in] and bt [n, r, d_out], without copying."""
        pairs = [self.factors(key, name) for name in names]
        return _strided([pair.a for pair in pairs]), _strided([pair.bt for pair in pairs])

    # -- packed copies ----------------------------------------------------------------------------------------------

    def pack_for(self, keys: Iterable[str]) -> None:
        """Keep packed copies for the adapters that steps keep using together.

        Called with the keys of a step's lanes, where that step gains from a packed copy. Copying costs a good part of
        a step, so a set must come back a few times before it is packed; a step whose set is covered by the packed one
        uses it as it is.
        """
        wanted = tuple(sorted(set(keys)))
        if len(wanted) < 2 or (self._packed is not None and self._packed.serves(wanted)):
            return
        last, times = self._waiting_to_pack
        times = times + 1 if wanted == last else 1
        self._waiting_to_pack = (wanted, times)
        if times >= _STEPS_BEFORE_PACKING:
            self._unpack()
            self._pack(wanted)

    def _pack(self, keys: tuple[str, ...]) -> None:
        sizes = [aligned(group.packed_bytes(keys)) for group in self._groups]
        pages = pages_for(sum(sizes))
        run = self._residency.reserve(pages) if pages else None
        if run is None:
            return  # no room: the strategies that need no packed copy serve as well
        buffer = self._arena.buffer(run.first_page, run.num_pages)
        offset = 0
        for group, size in zip(self._groups, sizes, strict=True):
            if size:
                group.pack(keys, buffer[offset : offset + size])
            offset += size
        self._packed = _Packed(keys, run)

    def _unpack(self) -> None:
        if self._packed is not None:
            for group in self._groups:
                group.unpack()
            self._residency.release(self._packed.run)
            self._packed = None

    def _forget(self, key: str) -> None:
        if self._packed is not None and key in self._packed.keys:
            self._unpack()
        for name in self._residents.pop(key).factors:
            del self._linears[name].site.factors[key]


_STEPS_BEFORE_PACKING = 3


@dataclasses.dataclass(frozen=True)
class _Packed:
    keys: tuple[str, ...]
    run: Run

    def serves(self, wanted: Sequence[str]) -> bool:
        """Every wanted adapter is packed, and not so many others that their columns would cost more than a new copy."""
        return set(wanted) <= set(self.keys) and len(self.keys) <= 2 * len(wanted)


# Layers that read the very same input: one shrink can serve them all.
_SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def site_groups(linears: Mapping[str, AdaptedLinear]) -> list[atmm.SiteGroup]:
    """The sites of adaptable layers, by what they read."""
    groups: list[atmm.SiteGroup] = []
    taken: set[str] = set()
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        members = [name]
        for leaves in _SHARED_INPUT:
            if leaf in leaves:
                members = [f"{parent}.{other}" for other in leaves if f"{parent}.{other}" in linears]
        if name not in taken:
            taken.update(members)
            layers = [linears[member] for member in members]
            groups.append(atmm.SiteGroup([layer.site for layer in layers]))
            if len(layers) > 1 and layers[0].weight.is_cuda:
                Siblings(layers)
    return groups


def _strided(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else first.numel()
    for before, after in itertools.pairwise(tensors):
        assert after.storage_offset() - before.storage_offset() == step, "run layout is not uniform"
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
