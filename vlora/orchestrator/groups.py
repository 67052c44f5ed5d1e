"""What several policies ask of the ready requests: who starves, and which adapter most of them want."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator.policies.base import Candidate, PolicyState


def starving_first(ready: Sequence[Candidate], state: PolicyState) -> list[Candidate]:
    """Those above theta, cut to what a batch takes by their credit, in order of their turn.

    A policy that puts them at the head of its order keeps the waiting bound: whoever starves waits for at most as many
    steps as full batches are ready. Within the batch the turn decides: each starving request gets a token, which sets
    its credit back, and if the rest of the step's tokens went by credit, prompts would be passed by newer ones again
    and again.
    """
    starving = [c for c in ready if c.credit > state.theta_s]
    if len(starving) <= state.max_batch_size:
        return starving
    chosen = {c.request_id for c in sorted(starving, key=lambda c: -c.credit)[: state.max_batch_size]}
    return [c for c in starving if c.request_id in chosen]


def largest_group(ready: Sequence[Candidate], state: PolicyState) -> tuple[str | None, list[Candidate]]:
    """The adapter (None: base model) with most ready requests among those that may be merged, and these requests.

    A tie keeps the adapter that is merged now; otherwise the group of the earliest arrival wins.
    """
    groups: dict[str | None, list[Candidate]] = {}
    for candidate in ready:
        if candidate.adapter is None or candidate.adapter in state.mergeable:
            groups.setdefault(candidate.adapter, []).append(candidate)
    if not groups:
        return None, []
    # max() keeps the first of equals, which is the group of the earliest arrival.
    merge = max(groups, key=lambda adapter: (len(groups[adapter]), adapter == state.merged_adapter))
    return merge, groups[merge]


def in_order(first: Sequence[Candidate], others: Sequence[Candidate], state: PolicyState) -> tuple[str, ...]:
    """Ids of `first`, then of `others` that are not among them, cut to what a batch takes."""
    ids = [c.request_id for c in first]
    known = set(ids)
    for c in others:
        if len(ids) >= state.max_batch_size:
            break
        if c.request_id not in known:
            ids.append(c.request_id)
    return tuple(ids[: state.max_batch_size])
