"""Policies by their name in `EngineConfig.policy`."""

from __future__ import annotations

from vlora.errors import BadConfig
from vlora.orchestrator.policies.algorithm1 import Algorithm1
from vlora.orchestrator.policies.base import Policy
from vlora.orchestrator.policies.baselines import MergedOnly
from vlora.orchestrator.policies.cost_based import CheapestPlan
from vlora.orchestrator.policies.dlora import DLora
from vlora.orchestrator.unmerged_only import UnmergedOnly

POLICIES: dict[str, type[Policy]] = {
    "vlora": Algorithm1,
    "vlora_cost": CheapestPlan,
    "merged_only": MergedOnly,
    "unmerged_only": UnmergedOnly,
    "dlora": DLora,
}


def make_policy(name: str) -> Policy:
    """Create the policy with this name.

    Raises:
        BadConfig: the name is unknown; the message lists the known ones.
    """
    if name not in POLICIES:
        raise BadConfig(f"policy is {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
