"""Groups of ready requests that several policies use: starving requests and the largest adapter group."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.orchestrator.policies.base import Candidate, PolicyState


def starving_first(ready: Sequence[Candidate], state: PolicyState) -> list[Candidate]:
    """Candidates with credit above theta, in scheduling order; at most a batch, chosen by highest credit.

    A policy that puts them first keeps the waiting bound: a starving request waits at most one step per full batch of
    ready requests. Within the batch the scheduling order applies. Each starving request gets a token, which resets its
    credit; if the remaining tokens went by credit, newer prompts would repeatedly overtake older ones.
    """
    starving = [c for c in ready if c.credit > state.theta_s]
    if len(starving) <= state.max_batch_size:
        return starving
    chosen = {c.request_id for c in sorted(starving, key=lambda c: -c.credit)[: state.max_batch_size]}
    return [c for c in starving if c.request_id in chosen]


def largest_group(ready: Sequence[Candidate], state: PolicyState) -> tuple[str | None, list[Candidate]]:
    """The adapter (None: base model) with most ready requests among those that may be merged, and these requests.

    A tie keeps the currently merged adapter; otherwise the group with the earliest arrival wins.
    """
    groups: dict[str | None, list[Candidate]] = {}
    for candidate in ready:
        if candidate.adapter is None or candidate.adapter in state.mergeable:
            groups.setdefault(candidate.adapter, []).append(candidate)
    if not groups:
        return None, []
    # max() keeps the first of equals, which is the group with the earliest arrival.
    merge = max(groups, key=lambda adapter: (len(groups[adapter]), adapter == state.merged_adapter))
    return merge, groups[merge]


def in_order(first: Sequence[Candidate], others: Sequence[Candidate], state: PolicyState) -> tuple[str, ...]:
    """Ids of `first`, then of `others` without duplicates, cut to the batch size."""
    ids = [c.request_id for c in first]
    known = set(ids)
    for c in others:
        if len(ids) >= state.max_batch_size:
            break
        if c.request_id not in known:
            ids.append(c.request_id)
    return tuple(ids[: state.max_batch_size])
