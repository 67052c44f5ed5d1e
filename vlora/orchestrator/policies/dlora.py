"""dLoRA's policy: merged while one adapter dominates, unmerged otherwise, with thresholds that adapt.

Source: B. Wu et al., dLoRA (OSDI 2024), dynamic batching, following its published artifact (LLMServe/dLoRA-artifact,
`_credit_schedule` in vllm/core/scheduler.py). V-LoRA describes it in sections 2, 3.2 and 6.1.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from vlora.orchestrator.cost_model import StepSize
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState, in_order, largest_group, starving_first
from vlora.types import Mode

_ADD, _MULTIPLY = 0.05, 1.1  # additive increase, multiplicative decrease of the thresholds (the artifact's values)
_TAKE, _KEEP = 1.0, 0.56  # initial values: a whole batch to merge, its share of an unmerged step's time to stay merged


class _Period(NamedTuple):
    """Thresholds, and the predicted performance of both modes since the last switch between them.

    Attributes:
        take: share of a first-come batch that an adapter's requests must reach to be merged.
        keep: share that they must reach to stay merged.
        merged_served: requests that merged steps would have served.
        merged_s: predicted time of these steps, merging included.
        unmerged_served: requests that unmerged steps would have served.
        unmerged_s: predicted time of these steps.
        largest: the adapter of the largest group in the last step.
    """

    merging: bool = False
    take: float = _TAKE
    keep: float = _KEEP
    merged_served: int = 0
    merged_s: float = 0.0
    unmerged_served: int = 0
    unmerged_s: float = 0.0
    largest: str | None = None

    def ended(self) -> _Period:
        """Start the next period. The threshold that led to this one is adjusted according to its benefit."""
        merged = self.merged_served * self.unmerged_s
        unmerged = self.unmerged_served * self.merged_s
        take, keep = self.take, self.keep
        if self.merging and merged > unmerged and take - _ADD > keep:
            take -= _ADD
        elif self.merging and merged < unmerged:
            take *= _MULTIPLY
        elif not self.merging and unmerged > merged and keep + _ADD < take:
            keep += _ADD
        elif not self.merging and unmerged < merged:
            keep /= _MULTIPLY
        return _Period(not self.merging, take, keep)


class DLora:
    """First come, first served and unmerged, unless one adapter's requests fill enough of the batch.

    Differences from the source: credits are the scheduler's, in seconds, where dLoRA counts how often an adapter's
    requests were skipped, so that the waiting bound holds; speeds come from the cost model, where dLoRA uses constants;
    operators and switching are this project's instead of dLoRA's slower ones.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        period: _Period = state.carried or _Period()
        first_come = ready[: state.max_batch_size]
        starving = starving_first(ready, state)
        if starving:
            period = period.ended() if period.merging else period
            return Decision(Mode.UNMERGED, None, in_order(starving, ready, state), period)
        largest, group = largest_group(ready, state)
        if period.merging:
            held = [c for c in ready if c.adapter == state.merged_adapter]
            if len(held) >= period.keep * len(first_come):
                largest, group = state.merged_adapter, held
        needed = (period.keep if period.merging and largest == state.merged_adapter else period.take) * len(first_come)
        merging = bool(group) and len(group) >= needed
        if merging != period.merging:
            period = period.ended()
        group = group[: state.max_batch_size]
        # While unmerged, a merge is counted each time a different adapter would have been merged.
        merge_s = state.costs.merge_s if largest not in (None, period.largest) else 0.0
        period = period._replace(
            merged_served=period.merged_served + len(group),
            merged_s=period.merged_s + _step_s(group, largest, state) + merge_s,
            unmerged_served=period.unmerged_served + len(first_come),
            unmerged_s=period.unmerged_s + _step_s(first_come, None, state),
            largest=largest,
        )
        if merging:
            return Decision(Mode.MERGED, largest, in_order(group, (), state), period)
        return Decision(Mode.UNMERGED, None, in_order(first_come, (), state), period)


def _step_s(batch: Sequence[Candidate], merged: str | None, state: PolicyState) -> float:
    """Predicted seconds of a step of `batch`, with all requests on the merged adapter or all unmerged over W0."""
    left = state.max_step_tokens
    items: list[tuple[str | None, int]] = []
    for c in sorted(batch, key=_new_tokens):  # decoding requests run beside any prompt
        items.append((c.adapter, min(c.new_tokens, left)))
        left -= items[-1][1]
        if not left:
            break
    return state.costs.step_s(StepSize.holding(items, merged, sum([c.cached_len for c in batch])))


_new_tokens = operator.attrgetter("new_tokens")
