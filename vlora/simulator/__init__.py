"""The scheduler without a model: real books and policies, a fake clock, and a machine that only says how long it takes.

Reading order: `arrivals.py` (what comes in), `popularity.py`, `workloads.py` and `traces.py` (where it comes from),
`machine.py` (what a step costs), `replica.py` (one engine on paper), `replay.py` (all of it together), `measures.py`.
"""

from vlora.simulator.arrivals import Arrival
from vlora.simulator.machine import MEASURED, read_costs
from vlora.simulator.measures import Measures
from vlora.simulator.replay import replay
from vlora.simulator.replica import Box
from vlora.simulator.traces import read_trace
from vlora.simulator.workloads import WORKLOADS, make_workload

__all__ = [
    "MEASURED",
    "WORKLOADS",
    "Arrival",
    "Box",
    "Measures",
    "make_workload",
    "read_costs",
    "read_trace",
    "replay",
]
