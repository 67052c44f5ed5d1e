"""Adapters of which the popularity drifts, few places for them on each replica: dLoRA's placement in kind."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from vlora.bench.cluster.rows import Row, drifting, gpu_replica, simulated
from vlora.bench.report import Goal
from vlora.routing import RULES
from vlora.simulator import ClusterConfig

PART = "drifting adapters"
VARIANTS = "variants of placed"
_REPLICAS, _ADAPTERS, _PLACES = 8, 64, 12
_VALUES = ("req/s", "active", "batch", "loads", "ttft p50 s", "ttft p99 s", "latency s", "CPU s")
MAIN = "20/s, 0.5 s to load"


def _case(rate: float, load_s: float) -> str:
    return f"{rate:g}/s, {load_s:g} s to load"


def _mean(part: str, case: str, rate: float, load_s: float, cluster: ClusterConfig, quick: bool) -> Row:
    """The means over the seeds."""
    config = gpu_replica(resident_adapters=_PLACES, load_s=load_s)
    found = []
    for seed in range(1 if quick else 3):
        arrivals = drifting(rate, 8_000 if quick else 20_000, _ADAPTERS, seed)
        found.append(simulated(part, case, arrivals, config, dataclasses.replace(cluster, seed=seed))[0])
    return {**found[0], **{name: statistics.fmean(each[name] for each in found) for name in _VALUES}}


def rows(quick: bool) -> list[Row]:
    """Every rule, then the default one under changed conditions."""
    loads = ((20.0, 0.5),) if quick else ((20.0, 0.08), (20.0, 0.5), (45.0, 0.5))
    cluster = ClusterConfig(replicas=_REPLICAS, quick=True)
    found = [
        _mean(PART, _case(rate, load_s), rate, load_s, dataclasses.replace(cluster, rule=rule), quick)
        for rate, load_s in loads
        for rule in RULES
    ]
    rate, load_s = 60.0, 0.5  # about the capacity
    variants = {
        "1.5 batches a replica": cluster,
        "no plan": dataclasses.replace(cluster, replan_s=0.0),
        "1 batch a replica": dataclasses.replace(cluster, over=1.0),
        "2 batches a replica": dataclasses.replace(cluster, over=2.0),
        "reports 0 to 1 s old": dataclasses.replace(cluster, report_s=0.1, report_age_s=1.0),
        "rebalanced every 10 s": dataclasses.replace(cluster, rebalance_s=10.0),
        "failures every 10 min": dataclasses.replace(cluster, mtbf_s=600.0, detect_s=2.0, restart_s=15.0),
    }
    for name, changed in variants.items():
        found.append(_mean(VARIANTS, f"{_case(rate, load_s)}; {name}", rate, load_s, changed, quick))
    return found


def goals(found: Sequence[Row]) -> list[Goal]:
    """Few loads, and early first tokens, against the rule of most front ends."""
    main = {each["rule"]: each for each in found if each["part"] == PART and each["case"] == MAIN}
    placed, least = main["placed"], main["least_loaded"]
    late = placed["ttft p99 s"] / least["ttft p99 s"]
    return [
        Goal("drifting adapters: loads, placed / least loaded", placed["loads"] / least["loads"], 0.2, True),
        Goal("drifting adapters: first token p99, placed / least loaded", late, 0.6, True),
    ]
