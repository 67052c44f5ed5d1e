"""The interface of scheduling policies, which decide inference mode and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from vlora.orchestrator.cost_model import Costs
from vlora.types import Mode


class Candidate(NamedTuple):
    """A ready request (its adapter is resident) as seen by a policy.

    Attributes:
        adapter: its adapter; None for the base model.
        credit: seconds, see `Scheduler`.
        new_tokens: tokens to compute before the next answer; 1 while decoding.
        cached_len: tokens with KV in place, which will be read.
        head: whether the next answer is the only one.
        urgent: starves because waiting theta would miss its deadline for the first answer.
        waited_s: seconds since it last ran, or entered the KV room.
        unanswered_s: seconds since its last answer, or since it entered.
    """

    request_id: str
    adapter: str | None
    credit: float
    new_tokens: int = 1
    cached_len: int = 0
    head: bool = False
    urgent: bool = False
    waited_s: float = 0.0
    unanswered_s: float = 0.0


class PolicyState(NamedTuple):
    """Further inputs of a decision.

    Attributes:
        merged_adapter: the adapter merged into the weights now; None for W0.
        mergeable: resident adapters with sufficient merge fidelity.
        theta_s: the credit in seconds above which a request starves.
        shadow_adapter: the adapter with merged weights available, in place or not; putting them in place is free. None
            where merged weights overwrite W0: then only the weights in place are available.
        max_step_tokens: the token budget that is applied to the decision afterwards.
        carried: `Decision.carried` of the previous decision; None at first.
    """

    merged_adapter: str | None
    mergeable: frozenset[str]
    max_batch_size: int
    theta_s: float
    shadow_adapter: str | None = None
    max_step_tokens: int = 512
    costs: Costs = Costs()
    carried: Any = None


class Decision(NamedTuple):
    """The mode and the requests of a step.

    Attributes:
        merged_adapter: None is W0, the merged form for base-model requests.
        order: request ids, most important first, at most max_batch_size; token and block budgets are applied
            afterwards.
        carried: passed to the next decision as `PolicyState.carried`. Policies that learn keep their state here.
        saved_s: predicted seconds that merged weights save in this step against unmerged steps, the price of their
            change deducted.
    """

    mode: Mode
    merged_adapter: str | None
    order: tuple[str, ...]
    carried: Any = None
    saved_s: float = 0.0


class Policy(Protocol):
    """A pure function of its arguments.

    Candidates are given in scheduling order (priority, fair share, arrival) and are never empty.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision: ...


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
