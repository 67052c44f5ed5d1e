"""V-LoRA's scheduling policy (section 4.4.3, Algorithm 1), repaired for continuous batching."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator.policy import Candidate, Decision, PolicyState
from vlora.types import Mode


class Algorithm1:
    """Merged when one adapter's requests fill more than half of the batch, mixed when a few starve, else unmerged.

    The paper's algorithm is written for batches that run once. Requests that stay for many steps need these repairs:

    - MaxBS is at most the number of ready requests, so that merging happens at low load too;
    - starving requests are sorted by credit and cut to MaxBS, so that the free count is never negative;
    - a tie between the largest groups keeps the adapter that is merged now;
    - base-model requests are a group like any other, whose merged form is W0;
    - an adapter whose merge fidelity is below the floor (not in `mergeable`) is never merged.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        max_batch = min(state.max_batch_size, len(ready))
        starving = sorted((c for c in ready if c.credit > state.theta_s), key=lambda c: -c.credit)[:max_batch]
        num_free = max_batch - len(starving)
        merge, group = _largest_group(ready, state)
        mergeable = len(starving) / max_batch <= 0.5 and len(group) / max_batch > 0.5
        if mergeable and not starving:
            return Decision(Mode.MERGED, merge, _ids(group[:max_batch]))
        starved = set(_ids(starving))
        others = [c for c in (group if mergeable else ready) if c.request_id not in starved]
        mode, merged = (Mode.MIXED, merge) if mergeable else (Mode.UNMERGED, None)
        return Decision(mode, merged, _ids([*starving, *others[:num_free]]))


def _largest_group(ready: Sequence[Candidate], state: PolicyState) -> tuple[str | None, list[Candidate]]:
    """The adapter (None: base model) with most ready requests among those that may be merged, and these requests."""
    groups: dict[str | None, list[Candidate]] = {}
    for candidate in ready:
        if candidate.adapter is None or candidate.adapter in state.mergeable:
            groups.setdefault(candidate.adapter, []).append(candidate)
    if not groups:
        return None, []
    # max() keeps the first of equals, which is the group of the earliest arrival.
    merge = max(groups, key=lambda adapter: (len(groups[adapter]), adapter == state.merged_adapter))
    return merge, groups[merge]


def _ids(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    return tuple(candidate.request_id for candidate in candidates)
