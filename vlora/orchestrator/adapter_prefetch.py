"""Selects the adapters to load before a step, those that must stay resident during it, and those to evict for KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set

from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.admission.request_queue import RequestQueue
from vlora.orchestrator.budgets import StepBudget, blocks_short
from vlora.orchestrator.credits import Credits
from vlora.orchestrator.encoder_budget import EncodeQueue
from vlora.types import MemoryView

_QUANTUM = 8  # residency quantum, as a multiple of the load time
_SMOOTH = 1 / 8  # weight of the newest load in the moving average


class ResidencyQuantum:
    """Adapter clustering for requests that are admitted immediately (S-LoRA section 4.2).

    If more adapters are needed than memory holds, a loaded adapter serves its requests for a while before it is
    replaced. Otherwise each step would load adapters that the next one evicts, and few would be available to run.

    An adapter stays for at most `_QUANTUM` times the average recent load time. A load is measured from when it is first
    seen, so time behind other loads is included. A request therefore gets its adapter after as many quanta as it takes
    to load all needed adapters, independent of the length of other answers.
    """

    def __init__(self) -> None:
        self._loading_since_s: dict[str, float] = {}  # first seen loading, by adapter
        self._resident_since_s: dict[str, float] = {}
        self._resident: frozenset[str] = frozenset()
        self._load_s = 0.0

    def observe(self, view: MemoryView, now: float) -> None:
        """Record loaded and evicted adapters; cheap if nothing changed."""
        if view.resident is not self._resident:
            for name in view.resident - self._resident:
                self._resident_since_s[name] = now
                self._load_s += _SMOOTH * (now - self._loading_since_s.get(name, now) - self._load_s)
            for name in self._resident - view.resident:
                del self._resident_since_s[name]
            self._resident = view.resident
        if view.loading or self._loading_since_s:
            self._loading_since_s = {name: self._loading_since_s.get(name, now) for name in view.loading}

    def has_expired(self, name: str, now: float) -> bool:
        return now - self._resident_since_s.get(name, now) >= _QUANTUM * self._load_s


@dataclasses.dataclass(eq=False)
class MemoryDemand:
    """The adapters and KV blocks that the unfinished requests need."""

    queue: RequestQueue
    budget: StepBudget
    credits: Credits
    encoding: EncodeQueue
    block_manager: BlockManager
    quantum: ResidencyQuantum
    clock: Callable[[], float]

    @property
    def needed_adapters(self) -> Set[str]:
        """Adapters that entered requests need.

        Adapters of requests that wait for admission or KV room are excluded: they would take pages that entered
        requests are expected to need.
        """
        return self.queue.kv.entered_adapters

    def adapters_by_credit(self) -> tuple[str, ...]:
        """The needed adapters in descending order of their requests' highest credit."""
        highest: dict[str, float] = {}
        tracked = [t for t in self.queue.admitted.values() if t.adapter is not None and t.entered]
        for t, credit in zip(tracked, self.credits.current(tracked, self.clock()), strict=True):
            assert t.adapter is not None
            if credit > highest.get(t.adapter, -1.0):
                highest[t.adapter] = credit
        return tuple(sorted(highest, key=lambda adapter: -highest[adapter]))

    def adapters_in_use(self) -> frozenset[str]:
        """Adapters that must stay resident.

        Evicting one stalls requests that hold KV blocks, or discards images that are partially encoded. While a request
        starves for an adapter that does not fit, only two kinds must stay: adapters within their residency quantum, and
        those of requests that were preempted and have not produced a token since. The other requests keep their KV and
        wait in turn.
        """
        now = self.clock()
        holders = (self.queue.admitted[holder] for holder in self.block_manager.holders)
        held = frozenset(
            t.adapter
            for t in holders
            if t.adapter is not None
            and (t.protected or not self.queue.adapter_starves or not self.quantum.has_expired(t.adapter, now))
        )
        return held | self.encoding.adapters_encoding

    def blocks_short(self) -> int:
        """Additional free KV blocks that the next step needs, see `budgets.blocks_short`."""
        return blocks_short(self.queue.admitted.values(), self.block_manager, self.budget)


def load_needed_adapters(demand: MemoryDemand, adapter_cache: AdapterCache, load: Callable[[str], bool]) -> None:
    """Load the adapters that requests need, in order of demand, as far as memory allows.

    Args:
        load: loads one adapter, evicting cold ones if necessary; False if it cannot fit now.
    """
    resident = adapter_cache.resident
    if demand.needed_adapters <= resident:
        for name in demand.needed_adapters:
            adapter_cache.touch(name)
        return
    pinned = pin_in_use(demand, adapter_cache)
    for name in demand.adapters_by_credit():
        if load(name):
            # Keep an adapter with less demand from evicting this one before its requests have run a step.
            adapter_cache.pin(name)
            pinned.append(name)
    for name in pinned:
        adapter_cache.unpin(name)


def evict_for_kv(demand: MemoryDemand, adapter_cache: AdapterCache, merged: str | None) -> None:
    """Evict adapters when KV blocks are short. Call after `load_needed_adapters`.

    If the next step lacks blocks, evicts adapters that no entered request needs: loading one again costs less than
    recomputing a request's KV. If a waiting request lacks blocks to enter, evicts only adapters that no request needs.
    """
    needed = {*demand.needed_adapters, merged}
    if num_blocks := demand.blocks_short():
        adapter_cache.evict_for_blocks(num_blocks, kept=needed)
    if num_blocks := demand.queue.kv.blocks_short:
        adapter_cache.evict_for_blocks(num_blocks, kept=needed | demand.queue.waiting_adapters)


def pin_in_use(demand: MemoryDemand, adapter_cache: AdapterCache) -> list[str]:
    """Pin the resident adapters that running requests need; return their names for the caller to unpin."""
    pinned = [name for name in demand.adapters_in_use() if name in adapter_cache.resident]
    for name in pinned:
        adapter_cache.pin(name)
    return pinned
