"""Rows of the cluster benchmark: one format for all parts.

N: replicas. active: replicas with requests, on average; batch: the requests of one of these. ttft: time to first token.
us: CPU time of a decision or plan. share: see the part.

The machine and the arrivals follow the papers' descriptions.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

from vlora.orchestrator import Costs
from vlora.simulator import Arrival, ClusterConfig, Measures, ReplicaConfig, replay
from vlora.simulator.arrivals import adapter_name
from vlora.simulator.popularity import power_law

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


def gpu_replica(max_batch_size: int = 32, resident_adapters: int = 64, load_s: float = 0.0) -> ReplicaConfig:
    """A replica with these costs, unmerged as Punica and S-LoRA."""
    return ReplicaConfig(
        costs=GPU,
        policy="unmerged_only",
        max_batch_size=max_batch_size,
        max_step_tokens=1024,
        kv_tokens=40_000,
        resident_adapters=resident_adapters,
        load_s=load_s,
    )


def rising_and_falling(peak: float, duration_s: float, seed: int = 0) -> Iterator[Arrival]:
    """Punica section 7.3: the rate rises and falls, gaps are exponential, popularity is Zipf-1.5.

    Lengths are log-normal, similar to ShareGPT's, since the paper does not give them as numbers.

    Args:
        peak: requests per second in the middle.
        duration_s: an hour in the paper.
        seed: of all draws.
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


Row = dict[str, Any]

_EMPTY: Row = {
    "part": "",
    "case": "",
    "rule": "",
    "N": None,
    "req/s": None,
    "active": None,
    "batch": None,
    "loads": None,
    "ttft p50 s": None,
    "ttft p99 s": None,
    "latency s": None,
    "p50 us": None,
    "p99 us": None,
    "share": None,
    "CPU s": None,
    "MiB": None,
    "samples": [],
}


def row(part: str, case: str, **values: Any) -> Row:
    """A row with these values; keys are given with "_" for each other character."""
    names = {_key(name): name for name in _EMPTY}
    return {**_EMPTY, "part": part, "case": case, **{names[name]: value for name, value in values.items()}}


def _key(name: str) -> str:
    return name.replace(" ", "_").replace("/", "_per_")


def simulated(
    part: str, case: str, arrivals: Iterable[Arrival], config: ReplicaConfig, cluster: ClusterConfig
) -> tuple[Row, Measures]:
    """Replay arrivals, and the row of the result."""
    began = time.process_time()
    measures = replay(arrivals, config, cluster)
    found = measures.as_dict()
    routing = found["routing"] or {"rule": "", "active_replicas": 1.0, "requests_while_busy": None}
    made = row(
        part,
        case,
        rule=routing["rule"],
        N=cluster.replicas,
        req_per_s=found["requests_per_s"],
        active=routing["active_replicas"],
        batch=routing["requests_while_busy"],
        loads=found["adapter_loads"],
        ttft_p50_s=found["ttft_s"]["p50"],
        ttft_p99_s=found["ttft_s"]["p99"],
        latency_s=found["mean_latency_s"],
        CPU_s=time.process_time() - began,
    )
    return made, measures
