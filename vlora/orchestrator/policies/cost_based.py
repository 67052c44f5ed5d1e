"""Cost-based policy: predicts the cost of each mode for the ready requests and selects the cheapest plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from vlora.orchestrator.cost_model import StepSize
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.types import Mode

_OVERDUE = 0.75  # as a share of the time to answer the whole batch unmerged
_VERIFY = 0.01  # of the time over merged weights is spent on unmerged steps that verify the cost of lanes
_LEAST_VERIFY = 0.25  # of an unmerged step is the least that such a step is taken to cost


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


class _Past(NamedTuple):
    """What is carried from one decision to the next.

    Attributes:
        missed_s: by adapter, what the steps so far would have saved with it merged.
        over_merged_s: seconds over merged weights since the last step over W0.
        debt_s: prices of changes of weights that were paid and have not been gained since.
    """

    missed_s: Mapping[str | None, float] = {}
    over_merged_s: float = 0.0
    debt_s: float = 0.0


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
    that each step would have had with it merged accumulate and are deducted from the price of the change. This is the
    ski-rental rule, with at most twice the cost of the best choice in hindsight.

    Three rules bound what is lost against unmerged steps where predictions are wrong (docs/decisions/0102):

    - a plan with merged weights must be faster by more than the measured error of predictions;
    - a price that is not gained back is a debt, which raises the price of the next change, so that losses grow with the
      square root of time at most;
    - now and then a step is unmerged, since the cost of lanes is not measured over merged weights.

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
        unmerged = _Plan(_mean_s(state, (total, unmerged_s)) / (1 + state.costs.error), None)
        alone_s = {adapter: _alone_s(adapter, work, state) for adapter, work in works.items()}
        round_s = sum(alone_s.values())
        plans = [
            _best_with(adapter, works, total, lanes_s, round_s - alone_s[adapter], starving, state)
            for adapter in _worth_merging(works, (starving or ready)[0], state)
        ]
        past: _Past = state.carried or _Past()
        # Plans predict the time until all have answered; only this step's part of it counts as missed or gained.
        num_steps = max(1.0, total.tokens / state.max_step_tokens)
        prices_s = {plan.merged: _price_s(plan.merged, state) for plan in plans}
        chosen = min([unmerged, *(plan for plan in plans if not prices_s[plan.merged])], key=lambda plan: plan.mean_s)
        missed_s: dict[str | None, float] = {}
        affordable = []
        for plan in plans:
            price_s = prices_s[plan.merged]
            if price_s:
                before_s, gain_s = past.missed_s.get(plan.merged, 0.0), chosen.mean_s - plan.mean_s
                if gain_s > max(0.0, price_s + past.debt_s - before_s):
                    affordable.append(plan)
                else:
                    missed_s[plan.merged] = max(0.0, before_s + gain_s / num_steps)
        chosen = min([chosen, *affordable], key=lambda plan: plan.mean_s)
        over_merged_s, debt_s, saved_s = 0.0, past.debt_s, 0.0
        if chosen.merged is not None:
            gain_s, price_s = (unmerged.mean_s - chosen.mean_s) / num_steps, prices_s[chosen.merged]
            over_merged_s = past.over_merged_s + chosen.mean_s / num_steps
            least_s = _LEAST_VERIFY * unmerged.mean_s / num_steps
            if _VERIFY * over_merged_s > max(gain_s, least_s) + state.costs.round_trip_s:
                chosen, over_merged_s = unmerged, 0.0
            else:
                saved_s, debt_s = gain_s - price_s, max(0.0, past.debt_s + price_s - gain_s)
        overdue_s = max(state.theta_s, _OVERDUE * unmerged_s)
        decided = _decision(chosen, works, total, starving, batch, ready, state, overdue_s)
        return decided._replace(carried=_Past(missed_s, over_merged_s, debt_s), saved_s=saved_s)


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
    chosen = {c.request_id for c in starving}
    others = [c.request_id for c in ready if c.request_id not in chosen]
    chosen.update(others[: state.max_batch_size - len(starving)])
    return [c for c in ready if c.request_id in chosen]


def _works(requests: Sequence[Candidate], max_step_tokens: int) -> dict[str | None, _Work]:
    sums: dict[str | None, tuple[int, ...]] = {}
    for _, adapter, _, new_tokens, cached_len, head, _, _, _ in requests:
        num_steps = 1 if new_tokens <= max_step_tokens else -(-new_tokens // max_step_tokens)
        own = (1, new_tokens, cached_len, num_steps, int(new_tokens > 1), int(head))
        sums[adapter] = tuple(map(add, sums[adapter], own)) if adapter in sums else own
    return {adapter: _Work._make(found) for adapter, found in sums.items()}


def _worth_merging(works: Mapping[str | None, _Work], first: Candidate, state: PolicyState) -> list[str]:
    """Adapters that are in place, in the shadow copy, of the first request, or have most tokens or most requests."""
    known = [adapter for adapter in works if adapter is not None and adapter in state.mergeable]
    if not known:
        return []
    largest = (max(known, key=lambda a: works[a].tokens), max(known, key=lambda a: works[a].requests))
    named = (a for a in (state.merged_adapter, state.shadow_adapter, first.adapter) if a is not None and a in known)
    return list(dict.fromkeys((*named, *largest)))


def _alone_s(adapter: str | None, work: _Work, state: PolicyState) -> float:
    """Predicted time for an adapter's requests in steps of their own, with the merge, after those of another."""
    if adapter is None or adapter not in state.mergeable:
        return _unmerged_s({adapter: work}, work, state) + state.costs.back_s + state.costs.change_s
    return _merged_s(work, state, Mode.MERGED) + state.costs.merge_s + state.costs.change_s


def _place_s(merged: str | None, state: PolicyState) -> float:
    """Predicted time to put the weights of a half in place, both halves of which a shadow copy keeps."""
    costs = state.costs
    if merged == state.merged_adapter:
        return 0.0
    return costs.change_s + (0.0 if not costs.back_s else costs.back_s if merged is None else costs.merge_s)


def _price_s(merged: str | None, state: PolicyState) -> float:
    """Predicted time to put the merged weights of a plan in place."""
    if merged == state.merged_adapter:
        return 0.0
    return state.costs.change_s + (0.0 if merged == state.shadow_adapter else state.costs.merge_s)


def _best_with(
    adapter: str,
    works: Mapping[str | None, _Work],
    total: _Work,
    lanes_s: float,
    others_alone_s: float,
    starving: Sequence[Candidate],
    state: PolicyState,
) -> _Plan:
    """The cheapest plan with `adapter` merged, excluding that merge.

    lanes_s: of all lanes together, unmerged. others_alone_s: of the other adapters, each merged in turn.
    """
    own, num_steps = works[adapter], _num_steps(total, state)
    others = total.minus(own)
    if not others.requests:  # no other requests to alternate with
        return _Plan(_mean_s(state, (own, _merged_s(own, state, Mode.MERGED))), adapter)
    # Each step of the merged half has a token of every starving request of the others.
    guests = StepSize.holding([(c.adapter, 1) for c in starving if c.adapter != adapter], adapter, 0)
    guests_s = _num_steps(own, state) * sum(map(state.costs.lanes_s, guests.lanes))
    own_s = _merged_s(own, state, guests.mode) + guests_s
    others_s = _unmerged_s(_without(adapter, works), others, state) + state.costs.round_trip_s
    # The others' tokens have the lane that subtracts the merged adapter.
    branch_s = state.costs.lanes_s(others.tokens, num_steps)
    together_s = _merged_s(total, state, Mode.MIXED) + (lanes_s - _lanes_s({adapter: own}, num_steps, state)) + branch_s
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
        if one:
            rest = works[first]
            rest_s = _alone_s(first, rest, state)
        else:
            rest = total.minus(work)
            rest_s = _unmerged_s(_without(plan.merged, works), rest, state) + _place_s(None, state)
        own_s = _merged_s(work, state, Mode.MERGED) + _place_s(plan.merged, state)
        own_turn = _rate(work, own_s, state) >= _rate(rest, rest_s, state)
    if own_turn:
        return plan.merged, [c for c in ready if c.adapter == plan.merged]
    if one:
        return first, [c for c in ready if c.adapter == first]
    return None, [c for c in ready if c.adapter != plan.merged]


def _mean_s(state: PolicyState, *parts: tuple[_Work, float]) -> float:
    """Mean time until the requests of parts that run one after the other have their answers.

    A request that continues has its next answer one whole round later, in whichever part it is. A request with a
    single answer is done with its part or earlier, because prompts are computed one after the other.
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


def _merged_s(work: _Work, state: PolicyState, mode: Mode = Mode.UNMERGED) -> float:
    """Predicted time for this work in steps of a mode, without lanes."""
    num_steps = _num_steps(work, state)
    return state.costs.merged_s(work.tokens, work.context, num_steps) + state.costs.mode_s(mode) * num_steps


def _lanes_s(works: Mapping[str | None, _Work], num_steps: float, state: PolicyState) -> float:
    """Predicted time for the lanes of all adapters when their requests share `num_steps` steps.

    An adapter has one lane per step for all its requests in that step. A request is in as many steps as its prompt
    takes, assumed to be drawn at random. The requests of an adapter count as equally long.
    """
    seconds = 0.0
    for adapter, (num_requests, tokens, _, steps, _, _) in works.items():
        if adapter is not None:
            left_out = 1 - steps / num_requests / num_steps  # of all steps, by one request
            num_lanes = num_steps * (1 - left_out**num_requests) if left_out > 0 else num_steps
            seconds += state.costs.lanes_s(tokens, num_lanes)
    return seconds


def _num_steps(work: _Work, state: PolicyState) -> float:
    """Number of steps for this work, as a fraction.

    Steps beyond the first exist only because of the token budget. Prompts account for their share of these; decoding
    requests continue meanwhile.
    """
    return max(1.0, 1 + (work.tokens / state.max_step_tokens - 1) * work.prompts / work.requests)


def _rate(work: _Work, seconds: float, state: PolicyState) -> float:
    """Answers per second of the cost excluding tokens, which must be computed sooner or later: prompts delay no half.

    Infinite while the machine's speed is unknown.
    """
    beside_s = seconds - state.costs.tokens_s(work.tokens, _num_steps(work, state))
    return work.requests / beside_s if beside_s > 0 else math.inf
