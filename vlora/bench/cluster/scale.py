"""A million requests on a thousand replicas, in a process of its own: the memory of other libraries would count.

python -m vlora.bench.cluster.scale NUM_REPLICAS NUM_REQUESTS RULE
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from vlora.bench.cluster.rows import Row, gpu_replica, simulated
from vlora.simulator import ClusterConfig, make_workload

PART = "scale"
_REQUESTS_A_SECOND = 4.0  # per replica


def rows(quick: bool) -> list[Row]:
    """Under Punica's rule and the default one."""
    found = []
    for rule in ("punica", "placed"):
        size = ("100", "20000") if quick else ("1000", "1000000")
        command = [sys.executable, "-m", "vlora.bench.cluster.scale", *size, rule]
        found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return found


def measure(num_replicas: int, num_requests: int, rule: str) -> Row:
    """Simulate with ten adapters per replica."""
    rate = _REQUESTS_A_SECOND * num_replicas
    workload = make_workload(f"gamma:rate={rate},prompt_min=64,prompt_max=512,answer_min=32,answer_max=384")
    arrivals = workload.arrivals(num_requests, 10 * num_replicas, 0)
    cluster = ClusterConfig(replicas=num_replicas, rule=rule, quick=True)
    made, _ = simulated(PART, f"{num_requests} requests", arrivals, gpu_replica(), cluster)
    # Unlike that of getrusage, this peak does not include the process that started this one.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return {**made, "MiB": int(peak[1]) / 1024}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
