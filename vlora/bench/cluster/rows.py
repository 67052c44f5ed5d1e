"""Rows of the cluster benchmark: one format for all parts.

N: replicas. active: replicas with requests, on average; batch: the requests of one of these. ttft: time to first token.
us: CPU time of a decision or plan. share: see the part.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vlora.simulator import Arrival, ClusterConfig, Measures, ReplicaConfig, replay

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
