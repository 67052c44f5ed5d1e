"""V-LoRA's scheduling policy (section 4.4.3, Algorithm 1), repaired for continuous batching."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator.policy import Candidate, Decision, PolicyState
from vlora.types import Mode


class Algorithm1:
    """Merge when one adapter's requests fill more than half of the batch; mix when others starve; else run unmerged.

    Written for batches that run once, the paper's algorithm needs these repairs when requests stay for many steps: MaxBS is
    at most the number of ready requests, so that merging happens at low load too; starving requests are sorted by credit and
    cut to MaxBS; ties between groups keep the adapter that is merged now; base-model requests are a group whose merged form
    is W0; an adapter whose merge fidelity is too low is never merged.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        if not ready:
            return Decision(Mode.UNMERGED, None, ())
        max_batch = min(state.max_batch_size, len(ready))
        starving = [c for c in ready if c.credit > state.theta_s]
        starving.sort(key=lambda c: -c.credit)
        starving = starving[:max_batch]
        free = max_batch - len(starving)
        merge, group = self._largest_group(ready, state)
        if group and len(starving) / max_batch <= 0.5 and len(group) / max_batch > 0.5:
            if not starving:
                return Decision(Mode.MERGED, merge, _ids(group[:max_batch]))
            served = set(_ids(starving))
            rest = [c for c in group if c.request_id not in served]
            return Decision(Mode.MIXED, merge, _ids([*starving, *rest[:free]]))
        served = set(_ids(starving))
        rest = [c for c in ready if c.request_id not in served]
        return Decision(Mode.UNMERGED, None, _ids([*starving, *rest[:free]]))

    @staticmethod
    def _largest_group(ready: Sequence[Candidate], state: PolicyState) -> tuple[str | None, list[Candidate]]:
        """The adapter (None: the base model) with most ready requests among those that may be merged."""
        groups: dict[str | None, list[Candidate]] = {}
        for candidate in ready:
            if candidate.adapter is None or candidate.adapter in state.mergeable:
                groups.setdefault(candidate.adapter, []).append(candidate)
        best: str | None = None
        members: list[Candidate] = []
        for adapter, group in groups.items():
            if len(group) > len(members) or (len(group) == len(members) and adapter == state.merged_adapter):
                best, members = adapter, group
        return best, members


def _ids(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    return tuple(candidate.request_id for candidate in candidates)
