"""Credits: the waiting times that make a request starve, and the candidates that policies see."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from vlora.orchestrator.budgets import StepBudget
from vlora.orchestrator.cost_model import CostModel, MergedAdapters, num_lanes
from vlora.orchestrator.encoder_budget import SHARE, EncodeQueue
from vlora.orchestrator.policies.base import Candidate
from vlora.orchestrator.request_state import TrackedRequest


@dataclasses.dataclass(eq=False)
class Credits:
    """Computes credits and theta from the learned costs.

    credit of a request = time waited since it last ran + estimated time of its next step with the weights now in place
    + the switch needed to leave another adapter's merged weights (V-LoRA section 4.4.3). A request with credit above
    theta starves.

    Args:
        encoding: knows the images that a request needs encoded.
        theta_s: lower limit of theta, in seconds.

    Attributes:
        merged: the merged weights that were available after the last step.
    """

    cost: CostModel
    budget: StepBudget
    encoding: EncodeQueue
    theta_s: float
    encode_share: float

    def __post_init__(self) -> None:
        self.merged = MergedAdapters()

    def current(self, requests: Iterable[TrackedRequest], now: float) -> list[float]:
        """The credits of requests, given the weights that the last step left in place."""
        return self.of(requests, now, self.merged.in_place)

    def of(self, requests: Iterable[TrackedRequest], now: float, merged: str | None) -> list[float]:
        """The credits of requests while the weights of `merged` (None: W0) are in place."""
        costs, limit = self.cost.costs, self.budget.max_step_tokens
        # The step's fixed cost and its lanes' cost per token, by number of lanes, for short and long lanes. They are
        # precomputed, since this loop runs for every request in every step.
        prices, short = ((costs.lane_s, costs.adapter_s), (costs.long_lane_s, costs.long_adapter_s)), costs.short_lane
        lanes = [[(costs.base_s + n * adapter_s, n * lane_s) for lane_s, adapter_s in prices] for n in range(3)]
        context_s, merge_s = costs.context_token_s, 0.0 if merged is None else costs.merge_s
        patch_s, tokens_s = costs.patch_s, costs.tokens_s
        own, base, other = lanes[0], lanes[num_lanes(None, merged)], lanes[1 if merged is None else 2]
        base, other = ([(fixed_s + merge_s, lane_s) for fixed_s, lane_s in each] for each in (base, other))
        token_s = tokens_s(1)
        credits: list[float] = []
        for t in requests:
            adapter, cached = t.active, t.cached_len
            tokens = t.device_len - cached
            if tokens > limit:
                tokens = limit
            fixed_s, lane_s = (own if adapter == merged else base if adapter is None else other)[tokens > short]
            own_s = fixed_s + (token_s if tokens == 1 else tokens_s(tokens)) + lane_s * tokens + context_s * cached
            if t.images:
                own_s += patch_s * self.encoding.patches_left(t)
            credits.append(now - t.last_ran_s + own_s)
        return credits

    def theta(self, ready: Sequence[TrackedRequest], merged: str | None, admitted: Collection[TrackedRequest]) -> float:
        """The effective theta: the setting, but at least the longest possible time for one round and one more step.

        A round serves every ready request once, in steps as long as these requests could make them, switch included.
        Their lanes count as equally long. If waiting for a turn alone exceeded the threshold, all requests would
        starve.

        Args:
            admitted: all admitted requests; images of those that are not ready may be encoded beside the step.
        """
        costs, most = self.cost.costs, self.budget.max_batch_size
        tokens = min(sum(sorted([t.device_len - t.cached_len for t in ready])[-most:]), self.budget.max_step_tokens)
        context = sum(sorted([t.cached_len for t in ready], reverse=True)[:most])
        lanes = min(len({t.active for t in ready}), most)
        branch_s = 0.0 if merged is None else costs.lanes_s(tokens)
        step_s = costs.merged_s(tokens, context) + costs.lanes_s(tokens, lanes) + branch_s
        if len(ready) < len(admitted) and any(t.images for t in admitted):
            step_s *= 1 + min(self.encode_share, SHARE)
        num_rounds = -(-len(ready) // most)
        return max(self.theta_s, (1 + num_rounds) * (step_s + costs.merge_s))

    def candidates(
        self, ready: Sequence[TrackedRequest], now: float, merged: str | None, theta_s: float
    ) -> list[Candidate]:
        """The ready requests as a policy sees them, in the given order."""
        credits = self.of(ready, now, merged)
        candidates = [
            Candidate(
                t.request_id,
                t.active,
                credit,
                t.device_len - t.cached_len,
                t.cached_len,
                t.is_head,
                False,
                now - t.last_ran_s,
                now - t.last_answer_s,
            )
            for t, credit in zip(ready, credits, strict=True)
        ]
        # Urgent requests rank behind all that starve by waiting, so that they do not affect the waiting bound.
        starves = math.nextafter(theta_s, math.inf)
        for place, t in enumerate(ready):
            if t.answer_by is None or t.first_answer_s is not None:
                continue
            if t.last_ran_s + credits[place] + theta_s >= t.answer_by:
                candidates[place] = candidates[place]._replace(urgent=True, credit=max(credits[place], starves))
        return candidates
