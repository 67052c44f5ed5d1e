"""Who runs next, and in which mode. Pure Python, deterministic under a fake clock; never touches a tensor."""

from vlora.orchestrator.cost import CostModel
from vlora.orchestrator.policy import Candidate, Decision, Policy, PolicyState, make_policy
from vlora.orchestrator.scheduler import Scheduler

__all__ = ["Candidate", "CostModel", "Decision", "Policy", "PolicyState", "Scheduler", "make_policy"]
