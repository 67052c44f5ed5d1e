"""The scheduler without a model: real bookkeeping and policies, a simulated clock, and a model of step times.

Reading order: `arrivals.py` (requests), `workloads.py` (their sources), `machine.py` (the cost of a step),
`replica.py` (one simulated engine), `world.py` (the simulation), `measures.py`.
"""

from vlora.simulator.arrivals import Arrival
from vlora.simulator.cluster import ClusterConfig
from vlora.simulator.machine import MEASURED, read_costs
from vlora.simulator.measures import Measures
from vlora.simulator.replica import ReplicaConfig
from vlora.simulator.workloads import WORKLOADS, make_workload, read_trace
from vlora.simulator.world import replay

__all__ = [
    "MEASURED",
    "WORKLOADS",
    "Arrival",
    "ClusterConfig",
    "Measures",
    "ReplicaConfig",
    "make_workload",
    "read_costs",
    "read_trace",
    "replay",
]
