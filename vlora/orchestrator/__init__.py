"""Who runs next, and in which mode. Pure Python, deterministic under a fake clock; never touches a tensor.

Reading order: `policy.py` (the interface), `algorithm1.py` (the paper's policy), `tracked.py` (a request's three
lengths), `budgets.py` (cutting a decision to tokens and blocks), `cost.py`, `scheduler.py` (all of it together).
"""

from vlora.orchestrator.algorithm1 import Algorithm1
from vlora.orchestrator.cost import CostModel, Costs, StepSize
from vlora.orchestrator.policy import Candidate, Decision, Policy, PolicyState
from vlora.orchestrator.registry import POLICIES, make_policy
from vlora.orchestrator.scheduler import Scheduler
from vlora.orchestrator.waits import Waits
from vlora.orchestrator.wanted import bring_wanted, give_way_to_kv, pin_in_use

__all__ = [
    "POLICIES",
    "Algorithm1",
    "Candidate",
    "CostModel",
    "Costs",
    "Decision",
    "Policy",
    "PolicyState",
    "Scheduler",
    "StepSize",
    "Waits",
    "bring_wanted",
    "give_way_to_kv",
    "make_policy",
    "pin_in_use",
]
