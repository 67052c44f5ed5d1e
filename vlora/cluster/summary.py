"""The statistics of several engines as those of one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from vlora.types import EngineStats

_LARGEST = frozenset({"highest_credit_s", "num_adapters"})


def merged_stats(stats: Sequence[EngineStats], *, num_waiting: int = 0) -> EngineStats:
    """Sums of counters and of memory, the largest credit, and descriptions of the first engine.

    Args:
        stats: Of each engine, at least one.
        num_waiting: Further waiting requests.
    """
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
