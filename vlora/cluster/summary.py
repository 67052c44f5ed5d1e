"""The statistics and adapters of several engines as those of one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import msgspec

from vlora.types import AdapterStatus, EngineStats

_LARGEST = frozenset({"highest_credit_s", "max_context", "num_adapters"})


def merged_stats(stats: Sequence[EngineStats], *, num_waiting: int = 0) -> EngineStats:
    """Sums of counters and of memory, the largest credit and context, and descriptions of the first engine."""
    merged: dict[str, Any] = {}
    for field in EngineStats.__struct_fields__:
        values = [getattr(each, field) for each in stats]
        if isinstance(values[0], str):
            merged[field] = values[0]
        elif isinstance(values[0], dict):
            merged[field] = dict(sum(map(Counter, values), Counter()))
        elif isinstance(values[0], tuple):
            merged[field] = tuple(itertools.chain.from_iterable(values))
        else:
            merged[field] = max(values) if field in _LARGEST else sum(values)
    return msgspec.structs.replace(EngineStats(**merged), num_waiting=merged["num_waiting"] + num_waiting)


def failed_status(name: str, error: str) -> AdapterStatus:
    """The status of an adapter that no replica has read."""
    return AdapterStatus(
        name=name,
        version="",
        rank=0,
        num_bytes=0,
        resident=False,
        mergeable=False,
        merge_fidelity=0.0,
        touches_vision=False,
        heads=(),
        loaded=False,
        error=error,
    )


def merged_status(statuses: Iterable[AdapterStatus]) -> AdapterStatus:
    found = list(statuses)
    read = next((status for status in found if status.loaded), found[0])
    return msgspec.structs.replace(
        read,
        resident=any(status.resident for status in found),
        pinned=all(status.pinned for status in found),
        error=next((status.error for status in found if status.error is not None), None),
        num_loads=sum(status.num_loads for status in found),
    )


def merged_statuses(
    by_replica: Iterable[Iterable[AdapterStatus]],
    names: Set[str],
    cause_of: Callable[[str], Exception | None],
) -> tuple[AdapterStatus, ...]:
    """Of the adapters of these names. One that no replica has, as all have failed, has the error and no more values."""
    found: dict[str, list[AdapterStatus]] = {}
    for own in by_replica:
        for status in own:
            if status.name in names:
                found.setdefault(status.name, []).append(status)
    for name in names - found.keys():
        if (cause := cause_of(name)) is not None:
            found[name] = [failed_status(name, str(cause))]
    return tuple(merged_status(found[name]) for name in sorted(found))
