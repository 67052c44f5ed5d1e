"""What a step and a switch cost on this machine, learned from the steps that ran."""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from vlora.types import Batch

_FORGET = 0.98  # weight of the past per new sample: the fit follows a machine that slows down within some fifty steps
_SMOOTH = 0.2  # weight of the newest switch in the moving average
_SWEEPS = 4  # per sample; the fit starts from the last one, so a few suffice
# Lanes before tokens: while every step seen was unmerged the two cannot be told apart, and what is put down to lanes is
# an invitation to merge, which tells them apart. The other way round nobody would ever find out. Adapters before lanes,
# for the same reason: while no two requests had the same adapter, what is put down to adapters is an invitation to run
# several of one unmerged; merged steps would never tell.
_SWEEP_ORDER = (6, 5, 3, 2, 1, 0, 4)
_FORGOTTEN = 1e-12  # a feature last seen so long ago that its coefficient is left alone
# A step of more tokens is wide: it holds a prompt, whose adapter a CPU multiplies with by itself, while it reads those
# of short lanes where they lie, row by row, all in one go (`atmm.divided`).
NARROW = 32


class Costs(NamedTuple):
    """What a machine takes, in seconds: a step without tokens, then each of what `StepSize` counts.

    lane_s, adapter_s: of a narrow step, which has at most `NARROW` tokens; wide_lane_s, wide_adapter_s: of a wide one.
    merge_s: putting another adapter into the weights. back_s: going back to W0; 0 where a shadow copy keeps both W0 and
    the weights merged last, so that going between the two is free.
    """

    base_s: float = 0.0
    token_s: float = 0.0
    lane_s: float = 0.0
    wide_lane_s: float = 0.0
    context_token_s: float = 0.0
    adapter_s: float = 0.0
    wide_adapter_s: float = 0.0
    merge_s: float = 0.0
    back_s: float = 0.0

    @property
    def round_trip_s(self) -> float:
        """Leaving merged weights for W0 and coming back."""
        return self.back_s + self.merge_s if self.back_s else 0.0

    def lane_prices(self, num_tokens: float) -> tuple[float, float]:
        """Seconds of a token's lane, and of reading one adapter, in a step of so many tokens."""
        if num_tokens > NARROW:
            return self.wide_lane_s, self.wide_adapter_s
        return self.lane_s, self.adapter_s

    def step_s(
        self,
        num_tokens: float,
        num_lane_tokens: float,
        num_context: float,
        num_adapters: float,
        num_steps: float = 1.0,
    ) -> float:
        """Seconds of a step, merging not included; or of several alike, which have all this together."""
        lane_s, adapter_s = self.lane_prices(num_tokens / num_steps)
        return (
            self.base_s * num_steps
            + self.token_s * num_tokens
            + lane_s * num_lane_tokens
            + self.context_token_s * num_context
            + adapter_s * num_adapters
        )


class StepSize(NamedTuple):
    """What is in a step.

    tokens: computed in it. lane tokens: (token, lane) pairs, so a token with the deLoRA branch and its own adapter
    counts twice. context: tokens whose KV was in place before and is read. adapters: different ones that have a lane,
    the merged one's deLoRA branch included: each is read once, however many requests want it.
    """

    num_tokens: int
    num_lane_tokens: int
    num_context: int
    num_adapters: int

    @classmethod
    def of(cls, batch: Batch) -> StepSize:
        merged = batch.merged_adapter
        tokens = lane_tokens = context = 0
        read: set[str | None] = set()
        for item in batch.items:
            tokens += item.num_tokens
            context += item.start
            if item.adapter != merged:
                lane_tokens += num_lanes(item.adapter, merged) * item.num_tokens
                read.add(item.adapter)
        if read:
            read.add(merged)
            read.discard(None)
        return cls(tokens, lane_tokens, context, len(read))

    @property
    def features(self) -> tuple[float, ...]:
        """How often each of `Costs` counts, as far as they are of a step."""
        tokens, lane_tokens, context, adapters = self
        if tokens > NARROW:
            return 1.0, tokens, 0.0, lane_tokens, context, 0.0, adapters
        return 1.0, tokens, lane_tokens, 0.0, context, adapters, 0.0


def num_lanes(adapter: str | None, merged: str | None) -> int:
    """Lanes each token of a request takes: minus the merged adapter if that is another, plus its own if it has one."""
    if adapter == merged:
        return 0
    return (adapter is not None) + (merged is not None)


class CostModel:
    """Learns `Costs`: a step linear in (1, tokens, lane tokens, context tokens, adapters) with no negative coefficient,
    those of lanes and adapters being others in wide steps than in narrow ones.

    Online non-negative least squares: forgetting normal equations, coordinate descent from the last solution. No
    coefficient can be negative, so neither can an estimate, and of steps that are both narrow or both wide a larger one
    never looks cheaper than a smaller one.
    Before the first sample every estimate is 0: nothing is known, so nothing is assumed.
    """

    def __init__(self) -> None:
        self._gram = [[0.0] * _NUM for _ in range(_NUM)]
        self._moment = [0.0] * _NUM
        self._weights = [0.0] * _NUM
        self._switch_s: float | None = None
        self._back_s: float | None = None
        self._costs = Costs()

    @property
    def switch_s(self) -> float:
        """Expected seconds of merging another adapter."""
        return self._switch_s or 0.0

    @property
    def costs(self) -> Costs:
        """What is expected now."""
        return self._costs

    def observe_step(self, size: StepSize, seconds: float) -> None:
        """Learn from a step that took `seconds`, switching not included."""
        features = tuple(map(mul, size.features, _UNITS))
        weights, moment = self._weights, self._moment
        for i, (row, feature) in enumerate(zip(self._gram, features, strict=True)):
            row[:] = [_FORGET * old + feature * other for old, other in zip(row, features, strict=True)]
            moment[i] = _FORGET * moment[i] + feature * seconds
        for _ in range(_SWEEPS):
            for i in _SWEEP_ORDER:
                row = self._gram[i]
                if row[i] > _FORGOTTEN:
                    weights[i] = max(0.0, weights[i] + (moment[i] - sum(map(mul, row, weights))) / row[i])
        self._expect()

    def observe_switch(self, seconds: float) -> None:
        """Learn from a merge that took `seconds`."""
        self._switch_s = _smoothed(self._switch_s, seconds)
        self._expect()

    def observe_back(self, seconds: float) -> None:
        """Learn from a way back to W0 that took `seconds`. Never called where it is free."""
        self._back_s = _smoothed(self._back_s, seconds)
        self._expect()

    def _expect(self) -> None:
        self._costs = Costs._make((*map(mul, self._weights, _UNITS), self.switch_s, self._back_s or 0.0))


def _smoothed(average: float | None, newest: float) -> float:
    return newest if average is None else (1 - _SMOOTH) * average + _SMOOTH * newest


# Of each feature, so that usual values are near 1, which keeps the descent well conditioned.
_UNITS = (1.0, 1 / 64, 1 / 64, 1 / 64, 1 / 4096, 1 / 8, 1 / 8)
_NUM = len(_UNITS)
