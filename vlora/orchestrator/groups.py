"""What several policies ask of the ready requests: who starves, and which adapter most of them want."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator.policy import Candidate, PolicyState


def starving_first(ready: Sequence[Candidate], state: PolicyState) -> list[Candidate]:
    """Those above theta, highest credit first, cut to what a batch takes.

    A policy that puts them at the head of its order keeps the waiting bound: whoever starves waits for at most as many
    steps as full batches are ready.
    """
    starving = [c for c in ready if c.credit > state.theta_s]
    starving.sort(key=lambda c: -c.credit)
    return starving[: state.max_batch_size]


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
