"""`vlora bench cluster`: routing over many replicas, simulated with the live cluster's router.

The goals: Punica's rule needs few replicas (its figure 13), the default rule loads few adapters and answers early where
their popularity drifts (dLoRA's placement), and decisions cost little CPU time. The machine and the arrivals follow the
papers' descriptions.

Columns: N: replicas. active: replicas with requests, on average; batch: the requests of one of these. ttft: time to
first token. us: CPU time of a decision.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.plots import Picture
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal, Row
from vlora.orchestrator.cost_model import Costs
from vlora.routing import RULES, Need, Report, Room, Router
from vlora.simulator.arrivals import Arrival, adapter_name, power_law
from vlora.simulator.cluster_config import ClusterConfig
from vlora.simulator.measures import Measures, percentile
from vlora.simulator.replica import ReplicaConfig
from vlora.simulator.world import replay

GPU = Costs(
    base_s=0.018,
    token_s=0.000075,
    lane_s=0.00002,
    long_lane_s=0.00001,
    context_token_s=1.2e-7,
    adapter_s=0.0001,
    long_adapter_s=0.0001,
    merge_s=0.01,
    short_lane=8,
)
"""Steps of a 7 B model on one A100: about 30 ms with 32 requests, 1,044 tokens/s (Punica sections 5.2 and 7.2)."""

_COLUMNS = ("part", "case", "rule", "N", "req/s", "active", "batch", "loads", "ttft p50 s", "ttft p99 s", "latency s")


def row(**values: Any) -> Row:
    return dict.fromkeys((*_COLUMNS, "p50 us", "p99 us", "CPU s")) | {"samples": []} | values


def simulated(
    part: str, case: str, arrivals: Iterable[Arrival], cluster: ClusterConfig, **settings: Any
) -> tuple[Row, Measures]:
    """Replay arrivals over unmerged replicas, as Punica's and S-LoRA's."""
    config = ReplicaConfig(
        costs=GPU, policy="unmerged_only", max_batch_size=32, max_step_tokens=1024, kv_tokens=40_000, **settings
    )
    began = time.process_time()
    measures = replay(arrivals, config, cluster)
    found = measures.as_dict()
    routing = found["routing"]
    values = {
        "req/s": found["requests_per_s"],
        "active": routing["active_replicas"],
        "batch": routing["requests_while_busy"],
        "loads": found["adapter_loads"],
        "ttft p50 s": found["ttft_s"]["p50"],
        "ttft p99 s": found["ttft_s"]["p99"],
        "latency s": found["mean_latency_s"],
        "CPU s": time.process_time() - began,
    }
    return row(part=part, case=case, rule=routing["rule"], N=cluster.replicas, **values), measures


# -- figure 13 ---------------------------------------------------------------------------------------------------------

HOUR = "figure 13"
HOUR_MAIN = "20/s at the peak"
_HOUR_REPLICAS = 16
_SAMPLE_S = 10.0
_A_MINUTE = 6  # samples


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


def hour(quick: bool) -> list[Row]:
    """Every rule at one peak rate or two; Punica's with and without consolidation."""
    rules = (("least_loaded", 0.0), ("round_robin", 0.0), ("placed", 0.0), ("punica", 0.0), ("punica", 10.0))
    found = []
    for peak, (rule, consolidate_s) in itertools.product((20.0,) if quick else (20.0, 45.0), rules):
        cluster = ClusterConfig(
            replicas=_HOUR_REPLICAS, rule=rule, quick=True, consolidate_s=consolidate_s, sample_s=_SAMPLE_S
        )
        case = f"{peak:g}/s at the peak" + ", consolidation every 10 s" * bool(consolidate_s)
        made, measures = simulated(HOUR, case, rising_and_falling(peak, 900.0 if quick else 3600.0), cluster)
        made["batch"] = statistics.fmean(size for sample in measures.samples for size in sample.sizes.values() if size)
        if case == HOUR_MAIN:  # the plots' case
            made["samples"] = [list(sample.sizes.values()) for sample in measures.samples]
        found.append(made)
    return found


def hour_goals(found: Sequence[Row]) -> list[Goal]:
    """Few active replicas with large batches; consolidation is not needed for them."""
    main = {each["rule"]: each for each in found if each["case"] == HOUR_MAIN}
    punica, least = main["punica"], main["least_loaded"]
    return [
        Goal("figure 13: active replicas, punica / least loaded", punica["active"] / least["active"], 0.3, True),
        Goal("figure 13: requests of an active replica, punica", punica["batch"], 20.0, False),
    ]


# -- drifting popularity -----------------------------------------------------------------------------------------------

DRIFT = "drifting adapters"
DRIFT_MAIN = "20/s, 0.5 s to load"
_PERIOD_S = 120.0
_AVERAGED = ("req/s", "active", "batch", "loads", "ttft p50 s", "ttft p99 s", "latency s", "CPU s")


def drifting(rate: float, num_requests: int, num_adapters: int, seed: int) -> Iterator[Arrival]:
    """Popularity by a power law with exponent 1; the ranks of a third of the adapters are drawn again every period.

    In kind as dLoRA's evaluation of placement, which replays a production trace that is not published with adapters.
    """
    draws = random.Random(seed)
    sums = list(itertools.accumulate(power_law(num_adapters, 1.0)))
    order = list(range(num_adapters))
    now, turn = 0.0, 1
    for _ in range(num_requests):
        now += draws.expovariate(rate)
        if now > turn * _PERIOD_S:
            turn += 1
            places = draws.sample(range(num_adapters), num_adapters // 3)
            mixed = [order[place] for place in places]
            draws.shuffle(mixed)
            for place, adapter in zip(places, mixed, strict=True):
                order[place] = adapter
        adapter = order[draws.choices(range(num_adapters), cum_weights=sums)[0]]
        yield Arrival(now, adapter_name(adapter), draws.randint(64, 512), draws.randint(32, 256))


def drift(quick: bool) -> list[Row]:
    """Every rule with 64 adapters on 8 replicas with 12 places each; means over the seeds."""
    rows = []
    loads = ((20.0, 0.5),) if quick else ((20.0, 0.08), (20.0, 0.5), (45.0, 0.5))
    for (rate, load_s), rule in itertools.product(loads, RULES):
        cluster, found = ClusterConfig(replicas=8, rule=rule, quick=True), []
        for seed in range(1 if quick else 3):
            arrivals = drifting(rate, 8_000 if quick else 20_000, 64, seed)
            seeded = dataclasses.replace(cluster, seed=seed)
            case = f"{rate:g}/s, {load_s:g} s to load"
            found.append(simulated(DRIFT, case, arrivals, seeded, resident_adapters=12, load_s=load_s)[0])
        rows.append(found[0] | {name: statistics.fmean(each[name] for each in found) for name in _AVERAGED})
    return rows


def drift_goals(found: Sequence[Row]) -> list[Goal]:
    """Few loads, and early first tokens, against the rule of most front ends."""
    main = {each["rule"]: each for each in found if each["case"] == DRIFT_MAIN}
    placed, least = main["placed"], main["least_loaded"]
    late = placed["ttft p99 s"] / least["ttft p99 s"]
    return [
        Goal("drifting adapters: loads, placed / least loaded", placed["loads"] / least["loads"], 0.2, True),
        Goal("drifting adapters: first token p99, placed / least loaded", late, 0.6, True),
    ]


# -- decisions ---------------------------------------------------------------------------------------------------------

DECISIONS = "decisions"
_WAITING = 1000
_BOUNDS_US = {2: 50.0, 1000: 100.0}


def decisions(quick: bool) -> list[Row]:
    """Decisions of the rules with a queue, by number of replicas; then with shares of tenants."""
    numbers = (2, 1000) if quick else (2, 16, 128, 1000)
    rules = [name for name, rule in RULES.items() if rule.queues]
    found = [_decisions(name, number, quick, None) for number in numbers for name in rules]
    return [*found, _decisions("placed", 16, quick, {f"t{number}": 1.0 + number for number in range(8)})]


def _decisions(rule: str, num_replicas: int, quick: bool, tenant_weights: dict[str, float] | None) -> Row:
    """All replicas are full and 1,000 requests wait. One ends, which places the first, and another one arrives."""
    draws = random.Random(0)
    router = Router(rule, tenant_weights=tenant_weights)
    for place in range(num_replicas):
        router.join(f"{place:05d}", Room(32, 8192, 64))

    def need(number: int) -> Need:
        return Need(str(number), f"a{draws.randrange(1000)}", 16, number, tenant=f"t{number % 8}")

    total = 0
    while router.num_waiting < _WAITING:
        router.submit(need(total))
        total += 1
        if total % 5000 == 0:
            router.replan()
    running = [request_id for replica in router.replicas.values() for request_id in replica.holds]
    names = list(router.replicas)
    reported = Report(16, taken=10**9, ended=10**9)  # it includes everything that was sent

    def decide(number: int) -> None:
        place = draws.randrange(len(running))
        ((placed, _),) = router.ended(running[place])
        running[place] = placed.request_id
        router.submit(need(total + number))

    p50, p99 = _percentiles_us(decide, 1000 if quick else 10_000)
    report_us, _ = _percentiles_us(lambda number: router.report(names[number % len(names)], reported), 500)
    case = f"{_WAITING} waiting, a report {report_us:.0f} us" + ", 8 tenants' shares" * bool(tenant_weights)
    return row(part=DECISIONS, case=case, rule=rule, N=num_replicas, **{"p50 us": p50, "p99 us": p99})


def _percentiles_us(action: Callable[[int], Any], times: int) -> tuple[float, float]:
    spent = []
    for number in range(times):
        began = time.thread_time()
        action(number)
        spent.append(1e6 * (time.thread_time() - began))
    return percentile(spent, 50), percentile(spent, 99)


def decision_goals(found: Sequence[Row]) -> list[Goal]:
    worst = {number: max(each["p99 us"] for each in found if each["N"] == number) for number in _BOUNDS_US}
    return [
        Goal(f"a decision, {number} replicas, p99, worst rule, us", worst[number], bound_us, True)
        for number, bound_us in _BOUNDS_US.items()
    ]


# -- the benchmark -----------------------------------------------------------------------------------------------------


def cases(quick: bool) -> dict[str, tuple[str, bool]]:
    """Quick: fewer requests, a quarter of an hour instead of an hour."""
    return {part: (part, quick) for part in ("hour", "drift", "decisions")}


def measure(case: tuple[str, bool]) -> Measured:
    part, quick = case
    parts = {"hour": (hour, hour_goals), "drift": (drift, drift_goals), "decisions": (decisions, decision_goals)}
    rows_of, goals_of = parts[part]
    rows = rows_of(quick)
    return Measured(rows, goals=goals_of(rows))


def _over_the_hour(rows: Sequence[Row]) -> list[Row]:
    """Replicas with requests, and the requests of each of these; means over a minute."""
    made = []
    for one in rows:
        samples = one["samples"]
        for place in range(_A_MINUTE - 1, len(samples)):
            window = samples[place - _A_MINUTE + 1 : place + 1]
            active = sum(size > 0 for sizes in window for size in sizes) / len(window)
            batch = sum(map(sum, window)) / len(window) / max(1.0, active)
            at = {"rule": one["rule"], "minutes": _SAMPLE_S * place / 60}
            made.append({**at, "replicas with requests": active, "requests of each of these": batch})
    return made


def pictures(rows: Sequence[Row]) -> dict[str, Picture]:
    each_of_these = {name: name for name in ("replicas with requests", "requests of each of these")}
    hour = {"kind": "lines", "x": "minutes", "columns": each_of_these, "name": "{rule}"}
    late = {"loads": "adapter loads", "ttft p99 s": "first token, p99, s"}
    drift = {"kind": "bars", "where": {"part": DRIFT}, "x": "{case}", "columns": late, "name": "{rule}", "log": "y"}
    decisions = {
        "kind": "lines",
        "where": {"part": DECISIONS},
        "x": "N",
        "series": [{"y": f"{name} us", "name": f"{{rule}}, {name}"} for name in ("p50", "p99")],
        "ticked": True,
        "settings": {"xlabel": "replicas", "ylabel": "us of a decision"},
    }
    title = f"Punica's figure 13, simulated: 16 replicas, {HOUR_MAIN}"
    return {
        "hour": Picture(_over_the_hour(rows), [{**hour, "settings": {"xlabel": "minutes"}}], title),
        "placement": Picture(rows, [drift]),
        "decisions": Picture(rows, [decisions]),
    }


BENCH = Bench(name="cluster", cases=cases, measure=measure, pictures=pictures)
