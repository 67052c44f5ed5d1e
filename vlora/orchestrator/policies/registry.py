"""Policies by their name in `EngineConfig.policy`."""

from __future__ import annotations

from vlora.config import policy_name
from vlora.orchestrator.policies.algorithm1 import Algorithm1
from vlora.orchestrator.policies.base import Policy
from vlora.orchestrator.policies.baselines import MergedOnly, UnmergedOnly
from vlora.orchestrator.policies.cost_based import CostBased
from vlora.orchestrator.policies.dlora import DLora

POLICIES: dict[str, type[Policy]] = {
    "algorithm1": Algorithm1,
    "cost_based": CostBased,
    "merged_only": MergedOnly,
    "unmerged_only": UnmergedOnly,
    "dlora": DLora,
}


def make_policy(name: str) -> Policy:
    """Create the policy with this name, or with this former name (`vlora.config.POLICY_ALIASES`).

    Raises:
        BadConfig: the name is unknown; the message lists the known ones.
    """
    return POLICIES[policy_name(name)]()
