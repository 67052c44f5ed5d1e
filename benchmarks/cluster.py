"""`vlora bench cluster`: routing over many replicas, simulated with the live cluster's router.

The goals: Punica's rule needs few replicas (its figure 13), the default rule loads few adapters and answers early where
their popularity drifts (dLoRA's placement), throughput grows with the replicas (V-LoRA's table 3) and does not depend
on the number of adapters (S-LoRA), decisions and plans cost little CPU time, and large clusters can be simulated. The
machine and the arrivals follow the papers' descriptions.

Columns: N: replicas. active: replicas with requests, on average; batch: the requests of one of these. ttft: time to
first token. us: CPU time of a decision or plan. share: see the part.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import cluster_decisions
from benchmarks.cluster_simulation import GPU, Row, gpu_replica, simulated
from benchmarks.policy import full_batch_capacity
from vlora.bench.harness import Bench, Measured, module_command
from vlora.bench.plots import Plot
from vlora.bench.report import Goal
from vlora.routing import RULES
from vlora.simulator import Arrival, ClusterConfig, ReplicaConfig, make_workload
from vlora.simulator.arrivals import adapter_name
from vlora.simulator.measures import Sample
from vlora.simulator.popularity import hottest, power_law


def rising_and_falling(peak: float, duration_s: float, seed: int = 0) -> Iterator[Arrival]:
    """Punica section 7.3: the rate rises and falls, gaps are exponential, popularity is Zipf-1.5.

    Lengths are log-normal, similar to ShareGPT's, since the paper does not give them as numbers.
    """
    draws = random.Random(seed)
    sums = list(itertools.accumulate(power_law(200, 1.5)))
    now = 0.0
    while (now := now + draws.expovariate(peak)) <= duration_s:
        if draws.random() > math.sin(math.pi * now / duration_s):
            continue
        adapter = draws.choices(range(len(sums)), cum_weights=sums)[0]
        prompt = min(1024, max(8, round(draws.lognormvariate(5.0, 1.0))))
        answer = min(1024, max(8, round(draws.lognormvariate(5.2, 0.9))))
        yield Arrival(now, adapter_name(adapter), prompt, answer)


def drifting(
    rate: float, num_requests: int, num_adapters: int, seed: int, period_s: float = 120.0
) -> Iterator[Arrival]:
    """Popularity by a power law with exponent 1; the ranks of a third of the adapters are drawn again every period.

    In kind as dLoRA's evaluation of placement, which replays a production trace that is not published with adapters.
    """
    draws = random.Random(seed)
    sums = list(itertools.accumulate(power_law(num_adapters, 1.0)))
    order = list(range(num_adapters))
    now, turn = 0.0, 1
    for _ in range(num_requests):
        now += draws.expovariate(rate)
        if now > turn * period_s:
            turn += 1
            places = draws.sample(range(num_adapters), num_adapters // 3)
            mixed = [order[place] for place in places]
            draws.shuffle(mixed)
            for place, adapter in zip(places, mixed, strict=True):
                order[place] = adapter
        adapter = order[draws.choices(range(num_adapters), cum_weights=sums)[0]]
        yield Arrival(now, adapter_name(adapter), draws.randint(64, 512), draws.randint(32, 256))


HOUR = "figure 13"
_HOUR_REPLICAS = 16
_SAMPLE_S = 10.0
_IDLE_SAMPLES = 6  # a minute, after which a replica could be released
HOUR_MAIN = "20/s at the peak"
CONSOLIDATED = ", consolidation every 10 s"


def hour(quick: bool) -> list[Row]:
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
                replicas=_HOUR_REPLICAS, rule=rule, quick=True, consolidate_s=consolidate_s, sample_s=_SAMPLE_S
            )
            arrivals = rising_and_falling(peak, 900.0 if quick else 3600.0)
            case = f"{peak:g}/s at the peak" + CONSOLIDATED * bool(consolidate_s)
            made, measures = simulated(HOUR, case, arrivals, gpu_replica(), cluster)
            batch = [size for sample in measures.samples for size in sample.sizes.values() if size]
            made["batch"] = sum(batch) / len(batch)
            made["share"] = idle_share(measures.samples)
            if case == HOUR_MAIN:  # the plots' case
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


def hour_goals(found: Sequence[Row]) -> list[Goal]:
    """Few active replicas with large batches; consolidation is not needed for them."""
    main = {each["rule"]: each for each in found if each["case"] == HOUR_MAIN}
    punica, least = main["punica"], main["least_loaded"]
    return [
        Goal("figure 13: active replicas, punica / least loaded", punica["active"] / least["active"], 0.3, True),
        Goal("figure 13: requests of an active replica, punica", punica["batch"], 20.0, False),
    ]


DRIFT = "drifting adapters"
VARIANTS = "variants of placed"
_REPLICAS, _ADAPTERS, _PLACES = 8, 64, 12
_AVERAGED = ("req/s", "active", "batch", "loads", "ttft p50 s", "ttft p99 s", "latency s", "CPU s")
DRIFT_MAIN = "20/s, 0.5 s to load"


def _drift_case(rate: float, load_s: float) -> str:
    return f"{rate:g}/s, {load_s:g} s to load"


def _mean_of_seeds(part: str, case: str, rate: float, load_s: float, cluster: ClusterConfig, quick: bool) -> Row:
    """The means over the seeds."""
    config = gpu_replica(resident_adapters=_PLACES, load_s=load_s)
    found = []
    for seed in range(1 if quick else 3):
        arrivals = drifting(rate, 8_000 if quick else 20_000, _ADAPTERS, seed)
        found.append(simulated(part, case, arrivals, config, dataclasses.replace(cluster, seed=seed))[0])
    return {**found[0], **{name: statistics.fmean(each[name] for each in found) for name in _AVERAGED}}


def placing(quick: bool) -> list[Row]:
    """Every rule, then the default one under changed conditions."""
    loads = ((20.0, 0.5),) if quick else ((20.0, 0.08), (20.0, 0.5), (45.0, 0.5))
    cluster = ClusterConfig(replicas=_REPLICAS, quick=True)
    found = [
        _mean_of_seeds(DRIFT, _drift_case(rate, load_s), rate, load_s, dataclasses.replace(cluster, rule=rule), quick)
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
        found.append(_mean_of_seeds(VARIANTS, f"{_drift_case(rate, load_s)}; {name}", rate, load_s, changed, quick))
    return found


def placing_goals(found: Sequence[Row]) -> list[Goal]:
    """Few loads, and early first tokens, against the rule of most front ends."""
    main = {each["rule"]: each for each in found if each["part"] == DRIFT and each["case"] == DRIFT_MAIN}
    placed, least = main["placed"], main["least_loaded"]
    late = placed["ttft p99 s"] / least["ttft p99 s"]
    return [
        Goal("drifting adapters: loads, placed / least loaded", placed["loads"] / least["loads"], 0.2, True),
        Goal("drifting adapters: first token p99, placed / least loaded", late, 0.6, True),
    ]


WORKERS, ADAPTERS = "table 3", "many adapters"
PAPER = {1: 6.07, 2: 11.48, 4: 23.97}
"""V-LoRA, table 3: requests/s by number of A100 GPUs."""
_LOAD = 2.0  # of the capacity: the throughput is that of full batches
_FEW, _MANY = 20, 2000


def growing(quick: bool) -> list[Row]:
    """Exact replicas with the default policy by their number; quick ones by the number of adapters."""
    lengths = "prompt_min=192,prompt_max=320,answer_min=150,answer_max=250"
    single = full_batch_capacity(GPU, 256, 200, hottest(_FEW, 0.6))
    found = []
    for number in PAPER:
        workload = make_workload(f"hottest:rate={_LOAD * number * single},{lengths}")
        arrivals = workload.arrivals((400 if quick else 1500) * number, _FEW, 0)
        config = ReplicaConfig(costs=GPU, load_s=0.02)
        found.append(
            simulated(WORKERS, f"paper: {PAPER[number]} requests/s", arrivals, config, ClusterConfig(replicas=number))[
                0
            ]
        )
    for num_adapters in (_FEW, _MANY) if quick else (_FEW, 200, _MANY, 20_000):
        for rule in ("placed", "least_loaded", "punica"):
            workload = make_workload("gamma:rate=60,alpha=1,prompt_min=64,prompt_max=512,answer_min=32,answer_max=256")
            arrivals = workload.arrivals(6_000 if quick else 30_000, num_adapters, 0)
            config = gpu_replica(load_s=0.02)
            cluster = ClusterConfig(replicas=16, rule=rule, quick=True)
            found.append(simulated(ADAPTERS, f"{num_adapters} adapters", arrivals, config, cluster)[0])
    return found


def growing_goals(found: Sequence[Row]) -> list[Goal]:
    """Throughput grows with the replicas, and does not fall with the adapters."""
    rate = {each["N"]: each["req/s"] for each in found if each["part"] == WORKERS}
    adapters = {
        each["case"]: each["latency s"] for each in found if each["part"] == ADAPTERS and each["rule"] == "placed"
    }
    slower = adapters[f"{_MANY} adapters"] / adapters[f"{_FEW} adapters"]
    return [
        *(Goal(f"table 3: throughput of {n} / 1, per replica", rate[n] / rate[1] / n, 0.93, False) for n in (2, 4)),
        Goal(f"many adapters: latency with {_MANY} / with {_FEW}, placed", slower, 1.1, True),
    ]


def scale(quick: bool) -> list[Row]:
    """Under Punica's rule and the default one, in processes of their own: memory of other libraries would count."""
    found = []
    for rule in ("punica", "placed"):
        size = ("100", "20000") if quick else ("1000", "1000000")
        command, environment = module_command("benchmarks.cluster_simulation", *size, rule)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    return found


def scale_goals(found: Sequence[Row]) -> list[Goal]:
    size = f"{found[0]['N']} replicas, {found[0]['case']}"
    return [
        Goal(f"{size}, CPU s", max(each["CPU s"] for each in found), 120.0, at_most=True),
        Goal(f"{size}, MiB", max(each["MiB"] for each in found), 500.0, at_most=True),
    ]


def cases(quick: bool) -> dict[str, tuple[str, bool]]:
    """Quick: fewer requests, a quarter of an hour instead of an hour, a smaller cluster."""
    return {part: (part, quick) for part in ("hour", "placing", "growing", "decisions", "scale")}


def measure(case: tuple[str, bool]) -> Measured:
    part, quick = case
    parts = {
        "hour": (hour, hour_goals),
        "placing": (placing, placing_goals),
        "growing": (growing, growing_goals),
        "decisions": (cluster_decisions.decisions, cluster_decisions.decision_goals),
        "scale": (scale, scale_goals),
    }
    rows_of, goals_of = parts[part]
    rows = rows_of(quick)
    return Measured(rows, goals=goals_of(rows))


def _over_the_hour(rows: Sequence[Row]) -> list[Row]:
    """Replicas with requests, and the requests of each of these; means over a minute."""
    made = []
    for one in rows:
        samples = one["samples"]
        for place in range(_IDLE_SAMPLES - 1, len(samples)):
            window = samples[place - _IDLE_SAMPLES + 1 : place + 1]
            active = sum(size > 0 for sizes in window for size in sizes) / len(window)
            batch = sum(map(sum, window)) / len(window) / max(1.0, active)
            at = {"rule": one["rule"], "minutes": _SAMPLE_S * place / 60}
            made.append({**at, "replicas with requests": active, "requests of each of these": batch})
    return made


def _by_number(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "adapters": int(row["case"].split()[0])} for row in rows if row["part"] == ADAPTERS]


def _of(*parts: str) -> Any:
    return lambda row: row["part"] in parts


_LATE = ("loads", "ttft p99 s")

BENCH = Bench(
    name="cluster",
    cases=cases,
    measure=measure,
    plots=(
        Plot(
            file="hour",
            x="minutes",
            y=("replicas with requests", "requests of each of these"),
            by=("rule",),
            apart=True,
            title=f"Punica's figure 13, simulated: 16 replicas, {HOUR_MAIN}",
            derive=_over_the_hour,
        ),
        Plot(file="placement", kind="bars", x="case", y=_LATE, by=("rule",), apart=True, log="y", where=_of(DRIFT)),
        Plot(file="variants", kind="bars", x="case", y=_LATE, apart=True, log="y", where=_of(VARIANTS)),
        Plot(file="workers", x="N", y=("req/s",), where=_of(WORKERS)),
        Plot(
            file="growing", x="adapters", y=("latency s", "loads"), by=("rule",), apart=True, log="x", derive=_by_number
        ),
        Plot(file="decisions", x="N", y=("p50 us", "p99 us"), by=("rule",), log="x", where=_of("decisions")),
    ),
)
