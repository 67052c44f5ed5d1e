"""Cost-based policy: predicts the cost of each mode for the ready requests and selects the cheapest plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import sub
from typing import NamedTuple

from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.types import Mode

_OVERDUE = 0.75  # as a share of the time to answer the whole batch unmerged


class _Work(NamedTuple):
    """The work of some requests until each has its next answer.

    Attributes:
        steps: sum of the steps of each request; a long prompt takes several.
        prompts: requests that do not decode yet.
        heads: requests with a single answer.
    """

    requests: int
    tokens: int
    context: int
    steps: int
    prompts: int
    heads: int

    def minus(self, part: _Work) -> _Work:
        return _Work._make(map(sub, self, part))


class _Plan(NamedTuple):
    """A way to compute the next answer of every ready request.

    Attributes:
        mean_s: predicted mean time, excluding the merge of `merged`; see `_mean_s`.
        merged: the merged adapter; None for all unmerged over W0.
        split: the merged adapter's requests and all others alternate, merged and unmerged; otherwise all run together.
        one_by_one: split, with each of the other adapters merged in turn.
    """

    mean_s: float
    merged: str | None
    split: bool = False
    one_by_one: bool = False


class CostBased:
    """Minimizes the predicted mean time until the ready requests have their answers.

    For a request that continues, this is the end of the round in which each has its next answer; for a head request,
    its only answer. If more requests are ready than fit a batch, only the first batch in scheduling order counts. The
    others wait in any case, and alternating halves for their sake would delay all requests.

    - unmerged: all together over W0, a lane for each token of an adapter;
    - mixed(a): all together over `W0 + delta_a`: no lane for a's tokens, two for those of another adapter, one for the
      base model's. Cheaper than unmerged where a has more than half of the lanes;
    - split(a): a's requests merged, alternating with the others unmerged over W0. No lane for a's tokens and only one
      for the others', but the fixed time of a step is paid twice, and so is switching between W0 and the merged
      weights, which is free with a shadow copy. The half that answers more requests per second runs first;
    - one by one: like split, with the other adapters merged in turn too, for few requests with long prompts.

    Algorithm 1 has no such intermediate plans: it pauses the minority until it starves, or runs all requests unmerged.

    Another adapter is merged when that pays off for the ready requests, or has been missed for long enough: the savings
    that each step would have had with it merged accumulate and are deducted from the price of the merge. This is the
    ski-rental rule, with at most twice the cost of the best choice in hindsight.

    Starving requests are in every batch, which keeps the waiting bound. Starving requests that decode come first and
    decide which half of a split runs. Starving prefills get one token per step, enough for the waiting bound; more
    would share the machine among prompts, which finish earlier on average if computed one after the other, in order of
    arrival. That token costs its lanes and contributes little, so it is scheduled as late as the bound allows.

    An overdue prompt comes first too, in order of arrival. Otherwise a prompt in the half that is never preferred would
    be computed token by token, since each token resets its wait. A prompt is overdue if it has no answer after
    `_OVERDUE` times the time to answer the whole batch unmerged.
    """

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        starving = _starving(ready, state)
        batch = _first_batch(ready, starving, state)
        works = _works(batch, state.max_step_tokens)
        total = _Work(*map(sum, zip(*works.values(), strict=True)))
        lanes_s = _lanes_s(works, _num_steps(total, state), state)
        unmerged_s = _merged_s(total, state) + lanes_s + _place_s(None, state)
        unmerged = _Plan(_mean_s(state, (total, unmerged_s)), None)
        alone_s = {adapter: _alone_s(adapter, work, state) for adapter, work in works.items()}
        round_s = sum(alone_s.values())
        plans = [
            _best_with(adapter, works, total, lanes_s, round_s - alone_s[adapter], state)
            for adapter in _worth_merging(works, (starving or ready)[0], state)
        ]
        at_hand = (state.merged_adapter, state.shadow_adapter)
        chosen = min([unmerged, *(plan for plan in plans if plan.merged in at_hand)], key=lambda plan: plan.mean_s)
        missed: dict[str | None, float] = {}
        # Plans predict the time until all have answered, which may take many steps; only this step's part counts as
        # missed.
        num_steps = max(1.0, total.tokens / state.max_step_tokens)
        carried: Mapping[str | None, float] = state.carried or {}
        affordable = []
        for plan in plans:
            if plan.merged not in at_hand:
                missed_s, gain_s = carried.get(plan.merged, 0.0), chosen.mean_s - plan.mean_s
                if gain_s > max(0.0, state.costs.merge_s - missed_s):
                    affordable.append(plan)
                else:
                    missed[plan.merged] = max(0.0, missed_s + gain_s / num_steps)
        chosen = min([chosen, *affordable], key=lambda plan: plan.mean_s)
        overdue_s = max(state.theta_s, _OVERDUE * unmerged_s)
        return _decision(chosen, works, total, starving, batch, ready, state, overdue_s)._replace(carried=missed)


def _starving(ready: Sequence[Candidate], state: PolicyState) -> list[Candidate]:
    """Requests that must run now, longest wait first, cut to the batch size.

    The waiting bound counts time waited. Credit also counts the coming step, so it triggers early. Only requests that
    have waited longer precede one that has waited for theta, so it runs within the bound.
    """
    starving = [c for c in ready if c.waited_s > state.theta_s or c.urgent]
    starving.sort(key=lambda c: -c.waited_s)
    return starving[: state.max_batch_size]


def _first_batch(ready: Sequence[Candidate], starving: Sequence[Candidate], state: PolicyState) -> Sequence[Candidate]:
    """The starving requests and the first of the others, up to the batch size."""
    if len(ready) <= state.max_batch_size:
        return ready
    starving_ids, seats = {c.request_id for c in starving}, state.max_batch_size - len(starving)
    batch: list[Candidate] = []
    for c in ready:
        if c.request_id in starving_ids:
            batch.append(c)
        elif seats:
            seats -= 1
            batch.append(c)
    return batch


def _works(requests: Sequence[Candidate], max_step_tokens: int) -> dict[str | None, _Work]:
    sums: dict[str | None, list[int]] = {}
    for _, adapter, _, new_tokens, cached_len, head, _, _, _ in requests:
        num_steps = 1 if new_tokens <= max_step_tokens else -(-new_tokens // max_step_tokens)
        found = sums.get(adapter)
        if found is None:
            sums[adapter] = [1, new_tokens, cached_len, num_steps, new_tokens > 1, head]
        else:
            found[0] += 1
            found[1] += new_tokens
            found[2] += cached_len
            found[3] += num_steps
            found[4] += new_tokens > 1
            found[5] += head
    return {adapter: _Work._make(found) for adapter, found in sums.items()}


def _worth_merging(works: Mapping[str | None, _Work], first: Candidate, state: PolicyState) -> list[str]:
    """Adapters considered for merging.

    These are the merged adapter, the shadow adapter, that of the first request, and those with most tokens and most
    requests.
    """
    known = [adapter for adapter in works if adapter is not None and adapter in state.mergeable]
    if not known:
        return []
    largest = (max(known, key=lambda a: works[a].tokens), max(known, key=lambda a: works[a].requests))
    named = (a for a in (state.merged_adapter, state.shadow_adapter, first.adapter) if a is not None and a in known)
    return list(dict.fromkeys((*named, *largest)))


def _alone_s(adapter: str | None, work: _Work, state: PolicyState) -> float:
    """Predicted time for one adapter's requests in steps of their own, following those of another adapter.

    Includes merging where the adapter may be merged, because the previous adapter has replaced its merged weights.
    """
    if adapter is None or adapter not in state.mergeable:
        return _unmerged_s({adapter: work}, work, state) + state.costs.back_s
    return _merged_s(work, state) + state.costs.merge_s


def _place_s(merged: str | None, state: PolicyState) -> float:
    """Predicted time to put the weights of a half in place; 0 if a shadow copy keeps those of both halves."""
    if merged == state.merged_adapter or not state.costs.back_s:
        return 0.0
    return state.costs.back_s if merged is None else state.costs.merge_s


def _best_with(
    adapter: str,
    works: Mapping[str | None, _Work],
    total: _Work,
    lanes_s: float,
    others_alone_s: float,
    state: PolicyState,
) -> _Plan:
    """The cheapest plan with `adapter` merged, excluding that merge.

    Args:
        lanes_s: time of all lanes together, unmerged.
        others_alone_s: time of the other adapters, each merged in turn.
    """
    own, num_steps = works[adapter], _num_steps(total, state)
    others = total.minus(own)
    if not others.requests:  # no other requests to alternate with
        return _Plan(_mean_s(state, (own, _merged_s(own, state))), adapter)
    own_s = _merged_s(own, state)
    others_s = _unmerged_s(_without(adapter, works), others, state) + state.costs.round_trip_s
    # The others' tokens have the lane that subtracts the merged adapter.
    branch_s = state.costs.lanes_s(others.tokens, num_steps)
    together_s = _merged_s(total, state) + (lanes_s - _lanes_s({adapter: own}, num_steps, state)) + branch_s
    return min(
        _Plan(_mean_s(state, (total, together_s)), adapter),
        _Plan(_mean_s(state, (own, own_s), (others, others_s)), adapter, split=True),
        _Plan(_mean_s(state, (own, own_s), (others, others_alone_s)), adapter, split=True, one_by_one=True),
        key=lambda plan: plan.mean_s,
    )


def _decision(
    plan: _Plan,
    works: Mapping[str | None, _Work],
    total: _Work,
    starving: Sequence[Candidate],
    batch: Sequence[Candidate],
    ready: Sequence[Candidate],
    state: PolicyState,
    overdue_s: float,
) -> Decision:
    """The requests and weights of this step: leading requests, the selected half, then starving prefills."""
    starving_ids = {c.request_id for c in starving}
    overdue = [c for c in batch if c.new_tokens > 1 and c.unanswered_s > overdue_s and c.request_id in starving_ids]
    leading = [c for c in starving if c.new_tokens == 1 or c.urgent]
    seated = {c.request_id for c in leading}
    leading += [c for c in overdue if c.request_id not in seated]
    merged, half = _turn(plan, works, total, leading, batch, ready, state)
    chosen = list(leading)
    seated = {c.request_id for c in leading}
    seats, tokens = state.max_batch_size - len(starving), state.max_step_tokens - len(starving)
    tokens -= sum([c.new_tokens - 1 for c in overdue])
    for c in half:
        if c.request_id in seated:
            continue
        if c.request_id not in starving_ids:
            # A request with credit above theta would get a token even beyond the budget, and pay for its lanes.
            if seats == 0 or (tokens <= 0 and c.credit > state.theta_s):
                continue
            seats -= 1
        chosen.append(c)
        seated.add(c.request_id)
        tokens -= c.new_tokens
    chosen += [c for c in starving if c.request_id not in seated]
    order = tuple(c.request_id for c in chosen)
    if merged is None:
        return Decision(Mode.UNMERGED, None, order)
    alone = all(c.adapter == merged for c in chosen)
    return Decision(Mode.MERGED if alone else Mode.MIXED, merged, order)


def _turn(
    plan: _Plan,
    works: Mapping[str | None, _Work],
    total: _Work,
    starving: Sequence[Candidate],
    batch: Sequence[Candidate],
    ready: Sequence[Candidate],
    state: PolicyState,
) -> tuple[str | None, Sequence[Candidate]]:
    """The weights to put in place and the half that runs.

    A half that does not contain all starving requests must wait.
    """
    if not plan.split:
        return plan.merged, ready
    starving_of = {c.adapter for c in starving}
    first = starving[0].adapter if starving else next(c.adapter for c in batch if c.adapter != plan.merged)
    one = plan.one_by_one and first in state.mergeable and first != plan.merged and starving_of <= {first}
    if starving_of and (plan.merged not in starving_of or len(starving_of) == 1):
        own_turn = plan.merged in starving_of
    else:
        work = works[plan.merged]
        rest = works[first] if one else total.minus(work)
        rest_s = (
            _alone_s(first, rest, state)
            if one
            else _unmerged_s(_without(plan.merged, works), rest, state) + _place_s(None, state)
        )
        own_s = _merged_s(work, state) + _place_s(plan.merged, state)
        own_turn = _rate(work, own_s, state) >= _rate(rest, rest_s, state)
    if own_turn:
        return plan.merged, [c for c in ready if c.adapter == plan.merged]
    if one:
        return first, [c for c in ready if c.adapter == first]
    return None, [c for c in ready if c.adapter != plan.merged]


def _mean_s(state: PolicyState, *parts: tuple[_Work, float]) -> float:
    """Mean time until the requests of parts that run one after the other have their answers.

    A request that continues has its next answer one whole round later, in whichever part it is, so the length of the
    round counts. A request with a single answer is done with its part or earlier, because prompts are computed one
    after the other.

    Args:
        *parts: work and its seconds, in the order of execution.
    """
    left_s = round_s = sum([seconds for _, seconds in parts])
    saved_s = 0.0
    for work, seconds in parts:
        left_s -= seconds
        if work.heads:
            num_ends = max(1.0, min(work.requests, work.tokens / state.max_step_tokens))
            saved_s += work.heads * (left_s + seconds * (1 - 1 / num_ends) / 2)
    return round_s - saved_s / sum([work.requests for work, _ in parts])


def _without(adapter: str | None, works: Mapping[str | None, _Work]) -> dict[str | None, _Work]:
    return {other: work for other, work in works.items() if other != adapter}


def _unmerged_s(works: Mapping[str | None, _Work], total: _Work, state: PolicyState) -> float:
    """Predicted time for all of these together over W0. `total` is their sum."""
    if not total.requests:
        return 0.0
    return _merged_s(total, state) + _lanes_s(works, _num_steps(total, state), state)


def _merged_s(work: _Work, state: PolicyState) -> float:
    """Predicted time for this work with its own weights in place."""
    return state.costs.merged_s(work.tokens, work.context, _num_steps(work, state))


def _lanes_s(works: Mapping[str | None, _Work], num_steps: float, state: PolicyState) -> float:
    """Predicted time for the lanes of all adapters when their requests share `num_steps` steps.

    An adapter has one lane per step for all its requests in that step. A request is in as many steps as its prompt
    takes, assumed to be drawn at random. The requests of an adapter count as equally long.
    """
    lanes_s = state.costs.lanes_s
    seconds = 0.0
    for adapter, (num_requests, tokens, _, steps, _, _) in works.items():
        if adapter is None:
            continue
        left_out = 1 - steps / num_requests / num_steps  # of all steps, by one request
        num_lanes = num_steps * (1 - left_out**num_requests) if left_out > 0 else num_steps
        seconds += lanes_s(tokens, num_lanes)
    return seconds


def _num_steps(work: _Work, state: PolicyState) -> float:
    """Number of steps for this work, as a fraction.

    Steps beyond the first exist only because of the token budget. Prompts account for their share of these; decoding
    requests continue meanwhile.
    """
    return max(1.0, 1 + (work.tokens / state.max_step_tokens - 1) * work.prompts / work.requests)


def _rate(work: _Work, seconds: float, state: PolicyState) -> float:
    """Answers per second of the cost excluding tokens, which must be computed sooner or later.

    A prompt is therefore no reason to delay its half. Infinite while the machine's speed is unknown.
    """
    beside_s = seconds - state.costs.tokens_s(work.tokens, _num_steps(work, state))
    return work.requests / beside_s if beside_s > 0 else math.inf
