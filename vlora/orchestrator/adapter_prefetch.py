"""Which adapters come into memory before a step, and which must stay there meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from vlora.memory.adapter_cache import Residency
from vlora.orchestrator.scheduler import Scheduler


def bring_wanted(scheduler: Scheduler, residency: Residency, bring: Callable[[str], bool]) -> None:
    """Make the adapters that requests need resident, most wanted first, as far as memory goes.

    bring: loads one adapter, evicting cold ones if it must; False when it cannot fit now.
    """
    resident = residency.resident
    if scheduler.needed_adapters <= resident:
        for name in scheduler.needed_adapters:
            residency.touch(name)
        return
    pinned = pin_in_use(scheduler, residency)
    for name in scheduler.waiting_adapters():
        if bring(name):
            # A less wanted adapter may not evict it again before its requests have had their step.
            residency.pin(name)
            pinned.append(name)
    for name in pinned:
        residency.unpin(name)


def give_way_to_kv(scheduler: Scheduler, residency: Residency, merged: str | None) -> None:
    """Evict adapters where KV blocks are short: for the next step those that no entered request needs, as loading one
    again costs less than computing a request's KV again; for a request to enter those that no request needs at all.
    To be called after `bring_wanted`.

    merged: an adapter whose weights are in place, which stays.
    """
    needed = {*scheduler.needed_adapters, merged}
    if num_blocks := scheduler.blocks_short():
        residency.yield_blocks(num_blocks, kept=needed)
    if num_blocks := scheduler.blocks_short_to_enter():
        residency.yield_blocks(num_blocks, kept=needed | scheduler.adapters_outside())


def pin_in_use(scheduler: Scheduler, residency: Residency) -> list[str]:
    """Keep what requests under way need from being evicted; which adapters these are, for the caller to unpin."""
    pinned = [name for name in scheduler.adapters_in_use() if name in residency.resident]
    for name in pinned:
        residency.pin(name)
    return pinned
