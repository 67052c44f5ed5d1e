"""Adapters on the device: factors as views of arena runs, keyed by name and content version."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait

import torch

import atmm
from heads import TaskHead
from vlora.adapters import HostAdapter, SiteShape, aligned, carve
from vlora.adapters.layout import FactorShape
from vlora.memory.arena import Arena, pages_for
from vlora.memory.books import Run
from vlora.memory.residency import Residency
from vlora.memory.transfer import Transfer
from vlora.models.adapted import AdaptedLinear, Siblings


@dataclasses.dataclass(frozen=True)
class _Resident:
    shapes: Mapping[str, FactorShape]
    dtype: torch.dtype
    factors: Mapping[str, atmm.Factors]
    heads: Mapping[str, TaskHead]


@dataclasses.dataclass(frozen=True)
class _Arriving:
    adapter: HostAdapter
    factors: Mapping[str, atmm.Factors]
    copy: Future[None]


class AdapterBank:
    """Brings adapters into the arena, hands their factors to the sites, and takes them away again.

    An adapter is on its way first and resident then: its pages are taken in the books at once and stay pinned while
    they are written, beside the steps; only when all is there may a step use it.
    """

    def __init__(
        self,
        arena: Arena,
        residency: Residency,
        transfer: Transfer,
        language: Mapping[str, AdaptedLinear],
        vision: Mapping[str, AdaptedLinear],
        language_order: Sequence[str],
    ) -> None:
        self._arena = arena
        self._residency = residency
        self._transfer = transfer
        self._linears = {**language, **vision}
        self._order = (*language_order, *vision)
        self._vision = vision.keys()
        self._arriving: dict[str, _Arriving] = {}
        self._residents: dict[str, _Resident] = {}
        self._resident: frozenset[str] | None = frozenset()  # None when it is to be made anew
        self._groups = site_groups(language)
        self._packed: _Packed | None = None
        self._waiting_to_pack: tuple[tuple[str, ...], int] = ((), 0)
        self.num_loads = 0

    @property
    def sites(self) -> dict[str, SiteShape]:
        """The model's adaptable layers, in the order that factors lie in a run."""
        linears = ((name, self._linears[name]) for name in self._order)
        return {
            name: SiteShape(linear.in_features, linear.out_features, name in self._vision) for name, linear in linears
        }

    @property
    def resident(self) -> frozenset[str]:
        """Adapters that a step may use; the same object as long as nothing comes or goes."""
        if self._resident is None:
            self._resident = frozenset(self._residents)
        return self._resident

    @property
    def arriving(self) -> frozenset[str]:
        """Adapters on their way."""
        return frozenset(self._arriving)

    @property
    def pending(self) -> tuple[Future[None], ...]:
        """Copies under way."""
        return tuple(arriving.copy for arriving in self._arriving.values())

    def compile_ahead(self) -> None:
        """On a GPU: have the kernels of any step ready. On a CPU nothing is compiled per shape."""
        weight = next(iter(self._linears.values())).weight
        if weight.device.type == "cuda":
            atmm.compile_ahead(self._groups, weight.dtype, weight.device)

    def bring(self, adapter: HostAdapter) -> bool:
        """Start to make an adapter resident, evicting cold ones if it must; True when it is here or on its way.

        False, and nothing changed, when it cannot fit now.
        """
        key, num_pages = adapter.key, pages_for(adapter.run.nbytes)
        if key in self._residents or key in self._arriving:
            self._residency.touch(key)
            return True
        run = self._residency.bring(key, num_pages)
        if run is None and self._packed is not None:
            self._unpack()
            run = self._residency.bring(key, num_pages)
        self.forget_evicted()
        for moved in self._residency.drain_moved():
            self._follow(moved)
        if run is None:
            return False
        self._residency.pin(key)
        self.num_loads += 1
        target = self._arena.buffer(run.first_page, run.num_pages)[: adapter.run.nbytes]
        factors = _factors(target, adapter.shapes, _dtype(adapter))
        self._arriving[key] = _Arriving(adapter, factors, self._transfer.start(adapter.run, target))
        copy = self._arriving[key].copy
        if copy.done() and copy.exception() is None:
            self.settle(key)
        return True

    def forget_evicted(self) -> None:
        """Let go of adapters whose pages were taken."""
        for evicted in self._residency.drain_evicted():
            self._forget(evicted)

    def settle(self, key: str) -> None:
        """Wait until an adapter that is on its way is resident. Raises what went wrong; its pages are free then."""
        arriving = self._arriving[key]
        wait((arriving.copy,))
        del self._arriving[key]
        self._residency.unpin(key)
        if (error := arriving.copy.exception()) is not None:
            self._residency.drop(key)
            raise error
        self._show(key, arriving.factors)
        adapter, device = arriving.adapter, self._arena.bytes.device
        self._resident = None
        self._residents[key] = _Resident(
            adapter.shapes,
            _dtype(adapter),
            arriving.factors,
            {name: head.to(device) for name, head in adapter.heads.items()},
        )

    def collect(self) -> dict[str, Exception]:
        """Make resident what has arrived; the keys of those whose copy failed, and why."""
        failed: dict[str, Exception] = {}
        for key in [key for key, arriving in self._arriving.items() if arriving.copy.done()]:
            try:
                self.settle(key)
            except Exception as error:
                failed[key] = error
        return failed

    def drop(self, key: str) -> None:
        """Forget an adapter and free its memory; unknown keys are ignored. A copy that already runs is waited for."""
        arriving = self._arriving.pop(key, None)
        if arriving is not None:
            if not arriving.copy.cancel():
                wait((arriving.copy,))
            self._residency.unpin(key)
            self._residency.drop(key)
        elif key in self._residents:
            self._residency.drop(key)
            self._forget(key)

    def close(self) -> None:
        """Bring no more."""
        self._transfer.close()

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

    def _follow(self, key: str) -> None:
        """An adapter lies elsewhere now: new views of it. A packed copy of it holds what it held."""
        run, resident = self._residency.run(key), self._residents[key]
        buffer = self._arena.buffer(run.first_page, run.num_pages)
        factors = _factors(buffer, resident.shapes, resident.dtype)
        self._residents[key] = dataclasses.replace(resident, factors=factors)
        self._show(key, factors)

    def _show(self, key: str, factors: Mapping[str, atmm.Factors]) -> None:
        for name, pair in factors.items():
            self._linears[name].site.factors[key] = pair

    def _forget(self, key: str) -> None:
        if self._packed is not None and key in self._packed.keys:
            self._unpack()
        self._resident = None
        for name in self._residents.pop(key).factors:
            del self._linears[name].site.factors[key]


def _factors(buffer: torch.Tensor, shapes: Mapping[str, FactorShape], dtype: torch.dtype) -> dict[str, atmm.Factors]:
    return {name: atmm.Factors(*pair) for name, pair in carve(buffer, shapes, dtype).items()}


def _dtype(adapter: HostAdapter) -> torch.dtype:
    return next(iter(adapter.factors.values())).a.dtype


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
