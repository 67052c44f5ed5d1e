"""The simulated machine of `vlora bench cluster`, and its rows. It loads no torch: the memory of a run in a
process of its own counts.

python -m benchmarks.cluster_simulation NUM_REPLICAS NUM_REQUESTS RULE
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlora.orchestrator import Costs
from vlora.simulator import Arrival, ClusterConfig, Measures, ReplicaConfig, make_workload, replay

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


_REQUESTS_A_SECOND = 4.0  # per replica


def simulate(num_replicas: int, num_requests: int, rule: str) -> Row:
    """Simulate with ten adapters per replica."""
    rate = _REQUESTS_A_SECOND * num_replicas
    workload = make_workload(f"gamma:rate={rate},prompt_min=64,prompt_max=512,answer_min=32,answer_max=384")
    arrivals = workload.arrivals(num_requests, 10 * num_replicas, 0)
    cluster = ClusterConfig(replicas=num_replicas, rule=rule, quick=True)
    made, _ = simulated("scale", f"{num_requests} requests", arrivals, gpu_replica(), cluster)
    # Unlike that of getrusage, this peak does not include the process that started this one.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return {**made, "MiB": int(peak[1]) / 1024}


if __name__ == "__main__":
    print(json.dumps(simulate(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
