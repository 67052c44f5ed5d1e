"""A policy for benches that choose the mode of each step."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator import Candidate, Decision, PolicyState
from vlora.types import Mode


class FixedModePolicy:
    """A policy with a fixed plan: all ready requests, over W0 or over the first request's merged weights.

    Attributes:
        merging: Whether the weights are merged. The mode is then merged if all requests use that adapter, else mixed;
            otherwise it is unmerged.
    """

    def __init__(self) -> None:
        self.merging = False

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        order = tuple(c.request_id for c in ready[: state.max_batch_size])
        if not self.merging:
            return Decision(Mode.UNMERGED, None, order)
        merged = ready[0].adapter
        alone = all(c.adapter == merged for c in ready)
        return Decision(Mode.MERGED if alone else Mode.MIXED, merged, order)
