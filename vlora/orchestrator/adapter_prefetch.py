"""Selects the adapters to load before a step and those that must stay resident during it."""

from __future__ import annotations

from collections.abc import Callable

from vlora.memory.adapter_cache import Residency
from vlora.orchestrator.scheduler import Scheduler


def bring_wanted(scheduler: Scheduler, residency: Residency, bring: Callable[[str], bool]) -> None:
    """Load the adapters that requests need, in order of demand, as far as memory allows.

    Args:
        scheduler: provides the needed adapters.
        residency: the resident adapters.
        bring: loads one adapter, evicting cold ones if necessary; False if it cannot fit now.
    """
    resident = residency.resident
    if scheduler.needed_adapters <= resident:
        for name in scheduler.needed_adapters:
            residency.touch(name)
        return
    pinned = pin_in_use(scheduler, residency)
    for name in scheduler.waiting_adapters():
        if bring(name):
            # Keep a less wanted adapter from evicting this one before its requests have run a step.
            residency.pin(name)
            pinned.append(name)
    for name in pinned:
        residency.unpin(name)


def give_way_to_kv(scheduler: Scheduler, residency: Residency, merged: str | None) -> None:
    """Evict adapters when KV blocks are short. Call after `bring_wanted`.

    If the next step lacks blocks, evicts adapters that no entered request needs: loading one again costs less than
    recomputing a request's KV. If a waiting request lacks blocks to enter, evicts only adapters that no request needs.

    Args:
        scheduler: provides the demand for blocks and adapters.
        residency: the resident adapters.
        merged: the currently merged adapter, which is kept.
    """
    needed = {*scheduler.needed_adapters, merged}
    if num_blocks := scheduler.blocks_short():
        residency.yield_blocks(num_blocks, kept=needed)
    if num_blocks := scheduler.blocks_short_to_enter():
        residency.yield_blocks(num_blocks, kept=needed | scheduler.adapters_outside())


def pin_in_use(scheduler: Scheduler, residency: Residency) -> list[str]:
    """Pin the resident adapters that running requests need; return their names for the caller to unpin."""
    pinned = [name for name in scheduler.adapters_in_use() if name in residency.resident]
    for name in pinned:
        residency.pin(name)
    return pinned
