"""The baseline of S-LoRA and Punica: no adapter is ever merged."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator.groups import in_order, starving_first
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.types import Mode


class UnmergedOnly:
    """Every token with its own delta over W0, in order of arrival (Punica section 5.1, S-LoRA section 5).

    In both papers a request runs until it ends. Here it yields to starving requests, so that the waiting bound holds.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        return Decision(Mode.UNMERGED, None, in_order(starving_first(ready, state), ready, state))
