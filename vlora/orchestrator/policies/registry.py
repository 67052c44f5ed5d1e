"""Policies by their name in `EngineConfig.policy`."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.errors import BadConfig
from vlora.orchestrator.policies.algorithm1 import Algorithm1
from vlora.orchestrator.policies.base import Candidate, Decision, Policy, PolicyState, in_order, starving_first
from vlora.orchestrator.policies.cost_based import CostBased
from vlora.orchestrator.policies.dlora import DLora
from vlora.types import Mode


class MergedOnly:
    """Merges the oldest request's adapter and runs all requests of that adapter (dLoRA's "always merge" baseline).

    Other requests wait until that request has ended. This is the only policy without a waiting bound. An adapter that
    may not be merged is served unmerged, alone.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        adapter = ready[0].adapter
        order = tuple(c.request_id for c in ready if c.adapter == adapter)[: state.max_batch_size]
        if adapter is None or adapter in state.mergeable:
            return Decision(Mode.MERGED, adapter, order)
        return Decision(Mode.UNMERGED, None, order)


class UnmergedOnly:
    """Every token with its own delta over W0, in order of arrival (Punica section 5.1, S-LoRA section 5).

    In both papers a request runs until it ends. Here it yields to starving requests, so that the waiting bound holds.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        return Decision(Mode.UNMERGED, None, in_order(starving_first(ready, state), ready, state))


POLICIES: dict[str, type[Policy]] = {
    "algorithm1": Algorithm1,
    "cost_based": CostBased,
    "merged_only": MergedOnly,
    "unmerged_only": UnmergedOnly,
    "dlora": DLora,
}


def make_policy(name: str) -> Policy:
    """Create the policy with this name. Raises BadConfig if it is unknown, with the known ones."""
    if name not in POLICIES:
        raise BadConfig(f"policy is {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
