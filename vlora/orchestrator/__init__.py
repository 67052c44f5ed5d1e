"""Who runs next, and in which mode. Pure Python, deterministic under a fake clock; never touches a tensor.

Reading order: `base.py` (the interface), `algorithm1.py` (the paper's policy), `request_state.py` (a request's three
lengths), `budgets.py` (cutting a decision to tokens and blocks), `cost_model.py`, `scheduler.py` (all of it together).
"""

from vlora.orchestrator.adapter_prefetch import bring_wanted, give_way_to_kv, pin_in_use
from vlora.orchestrator.cost_model import CostModel, Costs, StepSize
from vlora.orchestrator.policies.algorithm1 import Algorithm1
from vlora.orchestrator.policies.base import Candidate, Decision, Policy, PolicyState
from vlora.orchestrator.policies.registry import POLICIES, make_policy
from vlora.orchestrator.scheduler import Scheduler
from vlora.orchestrator.waits import Waits

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
