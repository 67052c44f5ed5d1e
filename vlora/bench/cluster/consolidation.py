"""Punica's figure 13: replicas with requests over an hour in which the rate rises and falls."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.bench.cluster.rows import Row, gpu_replica, rising_and_falling, simulated
from vlora.bench.report import Goal
from vlora.simulator import ClusterConfig
from vlora.simulator.measures import Sample

PART = "figure 13"
_REPLICAS = 16
_SAMPLE_S = 10.0
_IDLE_SAMPLES = 6  # a minute, after which a replica could be released
MAIN = "20/s at the peak"
CONSOLIDATED = ", consolidation every 10 s"


def rows(quick: bool) -> list[Row]:
    """Every rule at one peak rate or two; Punica's with and without consolidation."""
    found = []
    for peak in (20.0,) if quick else (20.0, 45.0):
        for rule, consolidate_s in (
            ("least_loaded", 0.0),
            ("round_robin", 0.0),
            ("placed", 0.0),
            ("punica", 0.0),
            ("punica", 10.0),
        ):
            cluster = ClusterConfig(
                replicas=_REPLICAS, rule=rule, quick=True, consolidate_s=consolidate_s, sample_s=_SAMPLE_S
            )
            arrivals = rising_and_falling(peak, 900.0 if quick else 3600.0)
            case = f"{peak:g}/s at the peak" + CONSOLIDATED * bool(consolidate_s)
            made, measures = simulated(PART, case, arrivals, gpu_replica(), cluster)
            batch = [size for sample in measures.samples for size in sample.sizes.values() if size]
            made["batch"] = sum(batch) / len(batch)
            made["share"] = idle_share(measures.samples)
            if case == MAIN:  # the plots' case
                made["samples"] = [list(sample.sizes.values()) for sample in measures.samples]
            found.append(made)
    return found


def idle_share(samples: Sequence[Sample]) -> float:
    """The share of all replicas' time in idle periods of at least a minute, after which they could be released."""
    idle = total = 0
    for name in samples[0].sizes:
        run = 0
        for busy in [*(sample.sizes[name] > 0 for sample in samples), True]:
            if busy:
                idle += run if run >= _IDLE_SAMPLES else 0
            run = 0 if busy else run + 1
        total += len(samples)
    return idle / total


def goals(found: Sequence[Row]) -> list[Goal]:
    """Few active replicas with large batches; consolidation is not needed for them."""
    main = {each["rule"]: each for each in found if each["case"] == MAIN}
    punica, least = main["punica"], main["least_loaded"]
    return [
        Goal("figure 13: active replicas, punica / least loaded", punica["active"] / least["active"], 0.3, True),
        Goal("figure 13: requests of an active replica, punica", punica["batch"], 20.0, False),
    ]
