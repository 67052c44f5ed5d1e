"""More replicas (V-LoRA's table 3) and more adapters (S-LoRA section 7.2)."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.bench.cluster.rows import GPU, Row, gpu_replica, simulated
from vlora.bench.report import Goal
from vlora.bench.scheduling.policy import full_batch_capacity
from vlora.simulator import ClusterConfig, ReplicaConfig, make_workload
from vlora.simulator.popularity import hottest

WORKERS, ADAPTERS = "table 3", "many adapters"
PAPER = {1: 6.07, 2: 11.48, 4: 23.97}
"""V-LoRA, table 3: requests/s by number of A100 GPUs."""
_LOAD = 2.0  # of the capacity: the throughput is that of full batches
_FEW, _MANY = 20, 2000


def rows(quick: bool) -> list[Row]:
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


def goals(found: Sequence[Row]) -> list[Goal]:
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
