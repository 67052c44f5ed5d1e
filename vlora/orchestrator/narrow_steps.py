"""Whether prompts had better be computed a few tokens at a time, so that a step stays narrow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vlora.orchestrator.cost import NARROW, Costs, num_lanes
from vlora.orchestrator.policy import Candidate


def token_limit(chosen: Sequence[Candidate], merged: str | None, costs: Costs) -> int | None:
    """Most tokens of a step of `chosen` in that order over `merged`'s weights; None for as many as there is room for.

    In a wide step every adapter that is read is dearer, and everybody who decodes waits for it.
    Beside them a short prompt fits into the room that a few narrow steps have: its own answer comes later for it, it
    takes a lane in each, and none of the steps has the lanes it would decode with meanwhile. What brings everybody
    together to the same token sooner is done.
    """
    prompts = [c.new_tokens for c in chosen if c.new_tokens > 1]
    num_decoding, num_tokens = len(chosen) - len(prompts), sum(prompts)
    room = NARROW - num_decoding
    if not prompts or not num_decoding or len(chosen) > NARROW or num_tokens <= room:
        return None
    if all(c.adapter == merged for c in chosen):
        return None  # a wide step costs only what its tokens do
    wide_s = _step_s(chosen, 1.0, merged, costs)
    narrow_s = _step_s(chosen, room / num_tokens, merged, costs)
    following_s = _step_s([c._replace(new_tokens=1) for c in chosen], 1.0, merged, costs)
    ends = [-(-tokens // room) for tokens in itertools.accumulate(prompts)]
    sooner_s = num_decoding * (wide_s + (ends[-1] - 1) * following_s - ends[-1] * narrow_s)
    later_s = sum(ends) * narrow_s - len(prompts) * wide_s
    return NARROW if sooner_s > later_s else None


def _step_s(requests: Sequence[Candidate], share: float, merged: str | None, costs: Costs) -> float:
    """Predicted seconds of a step with one token of everybody who decodes, and that share of each prompt's."""
    tokens = lane_tokens = 0.0
    context = 0
    adapters: set[str | None] = set()
    for c in requests:
        now = c.new_tokens * share if c.new_tokens > 1 else 1
        each = num_lanes(c.adapter, merged)
        tokens += now
        lane_tokens += each * now
        context += c.cached_len
        if each:
            adapters.update((c.adapter, merged))
    return costs.step_s(tokens, lane_tokens, context, len(adapters - {None}))
