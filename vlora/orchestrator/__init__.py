"""The scheduler: selects the requests of each step and the inference mode.

Pure Python, deterministic under a fake clock; uses no tensors.

Reading order: `policies/base.py` (the interface), `policies/algorithm1.py` (the paper's policy), `request_state.py`
(per-request lengths), `budgets.py` (token and block budgets), `cost_model.py`, `scheduler.py` (everything combined).
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
