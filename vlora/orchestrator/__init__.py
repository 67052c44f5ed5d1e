"""The scheduler: selects the requests of each step and the inference mode.

Pure Python, deterministic under a fake clock; uses no tensors.

Reading order: `scheduler.py` (`schedule` and `record`), `policies/base.py` (the interface of policies),
`policies/algorithm1.py` (the paper's policy), `request_state.py` (per-request lengths), `credits.py` (starvation),
`budgets.py` (token and block budgets), `cost_model.py`, `admission/` (from arrival to the first step).
"""

from vlora.orchestrator.adapter_prefetch import evict_for_kv, load_needed_adapters, pin_in_use
from vlora.orchestrator.cost_model import CostModel, Costs, StepSize, TokenThresholds
from vlora.orchestrator.policies.algorithm1 import Algorithm1
from vlora.orchestrator.policies.base import Candidate, Decision, Policy, PolicyState
from vlora.orchestrator.policies.registry import POLICIES, make_policy
from vlora.orchestrator.scheduler import Scheduler
from vlora.orchestrator.stats import WaitStats

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
    "TokenThresholds",
    "WaitStats",
    "evict_for_kv",
    "load_needed_adapters",
    "make_policy",
    "pin_in_use",
]
