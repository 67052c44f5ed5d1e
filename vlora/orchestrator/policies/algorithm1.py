"""V-LoRA's scheduling policy (section 4.4.3, Algorithm 1), adapted to continuous batching."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState, in_order, largest_group, starving_first
from vlora.types import Mode


class Algorithm1:
    """Merged when one adapter's requests fill more than half of the batch, mixed when a few starve, else unmerged.

    The paper's algorithm is written for batches that run once. Requests that stay for many steps need these changes:

    - MaxBS is at most the number of ready requests, so that merging happens at low load too;
    - starving requests are sorted by credit and cut to MaxBS, so that the free count is never negative;
    - a tie between the largest groups keeps the currently merged adapter;
    - base-model requests form a group of their own; its merged form is W0;
    - an adapter with merge fidelity below the floor (not in `mergeable`) is never merged.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        max_batch = min(state.max_batch_size, len(ready))
        starving = starving_first(ready, state)
        merge, group = largest_group(ready, state)
        if len(starving) / max_batch > 0.5 or len(group) / max_batch <= 0.5:
            return Decision(Mode.UNMERGED, None, in_order(starving, ready, state))
        return Decision(Mode.MIXED if starving else Mode.MERGED, merge, in_order(starving, group, state))
