"""The cost of packing by the number of domains: the default beside one adapter per domain, and the fewest adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.bench.measuring import Bench, extent, small_scores, thresholds_of
from fusion.bench.metering import Meter
from fusion.bench.suite import suspected
from fusion.packing.guided import pack_guided
from fusion.packing.oracle import Oracle
from fusion.packing.orders import at_random


def growth(seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Pack parts of the suite's domains and all of them, by their number; each part contains the smaller ones."""
    made, sizes, steps = extent(quick)
    numbers = (2, 3) if quick else (3, 6, 9, len(made))
    bench = Bench(made, seed, sizes, steps, folder)
    thresholds = thresholds_of(small_scores(bench.splits))
    order = at_random(tuple(bench.domains), seed)
    rows = []
    for number in numbers:
        names = order[:number]
        own = {name: thresholds[name] for name in names}
        alone = Meter(bench.rehearsing)
        for name in names:
            alone((name,))
        meter = Meter(bench.rehearsing)
        packing = pack_guided(names, own, meter)
        oracle = Oracle(names, own, bench.rehearsing.together)
        bound = oracle.bound(suspected(made))
        optimum = oracle.optimum_of_few()
        rows.append(
            {
                "domains": list(names),
                "adapters": len(packing.adapters),
                "lower bound": bound.adapters,
                "optimum": None if optimum is None else len(optimum.adapters),
                "trainings": meter.trainings,
                "training s": meter.seconds,
                "alone s": alone.seconds,
            }
        )
    return {"seed": seed, "rows": rows}
