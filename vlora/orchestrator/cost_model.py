"""What a step and a switch cost on this machine, learned from the steps that ran."""

from __future__ import annotations

from collections.abc import Iterable
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


class Costs(NamedTuple):
    """What a machine takes, in seconds: a step without tokens, a token, a token's lane, a token of context, an adapter.

    An adapter's tokens lie side by side in a step: they are one lane, for which the adapter is read once. Lanes of at
    most `short_lane` tokens are short. On a CPU they are computed in another way than long ones
    (`atmm.strategies.hybrid`), so both have prices of their own; where all lanes are computed alike, none is short.

    lane_s, adapter_s: of short lanes; long_lane_s, long_adapter_s: of long ones.
    merge_s: putting another adapter into the weights. back_s: going back to W0; 0 where a shadow copy keeps both W0 and
    the weights merged last, so that going between the two is free. patch_s: encoding a patch of an image, whose work
    `VisionInput.num_patches` says.
    """

    base_s: float = 0.0
    token_s: float = 0.0
    lane_s: float = 0.0
    long_lane_s: float = 0.0
    context_token_s: float = 0.0
    adapter_s: float = 0.0
    long_adapter_s: float = 0.0
    merge_s: float = 0.0
    back_s: float = 0.0
    short_lane: int = 0
    patch_s: float = 0.0

    @property
    def round_trip_s(self) -> float:
        """Leaving merged weights for W0 and coming back."""
        return self.back_s + self.merge_s if self.back_s else 0.0

    def merged_s(self, num_tokens: float, num_context: float, num_steps: float = 1.0) -> float:
        """Seconds of steps that have so much together, without their lanes."""
        return self.base_s * num_steps + self.token_s * num_tokens + self.context_token_s * num_context

    def lanes_s(self, num_tokens: float, num_lanes: float = 1.0) -> float:
        """Seconds of so many lanes that have so many tokens together, all of one length."""
        if num_tokens > self.short_lane * num_lanes:
            return self.long_adapter_s * num_lanes + self.long_lane_s * num_tokens
        return self.adapter_s * num_lanes + self.lane_s * num_tokens

    def step_s(self, size: StepSize) -> float:
        """Seconds of a step, merging not included."""
        tokens_s = self.merged_s(size.num_tokens, size.num_context) if size.num_tokens else 0.0
        return tokens_s + sum(map(self.lanes_s, size.lanes)) + self.patch_s * size.num_patches


class StepSize(NamedTuple):
    """What is in a step.

    num_tokens: computed in it. lanes: tokens of each lane, one for each different adapter that is read, the merged
    one's deLoRA branch included: it has all tokens that have not the merged adapter. num_context: tokens whose KV was
    in place before and is read. num_patches: of images, encoded beside the tokens.
    """

    num_tokens: int
    lanes: tuple[int, ...]
    num_context: int
    num_patches: float = 0.0

    @classmethod
    def of(cls, batch: Batch) -> StepSize:
        context = sum([item.start for item in batch.items])
        size = cls.holding([(item.adapter, item.num_tokens) for item in batch.items], batch.merged_adapter, context)
        return size if batch.encode is None else size._replace(num_patches=batch.encode.num_patches)

    @classmethod
    def holding(cls, items: Iterable[tuple[str | None, int]], merged: str | None, num_context: int) -> StepSize:
        """items: adapter and tokens of each request."""
        by_adapter: dict[str | None, int] = {}
        for adapter, num_tokens in items:
            by_adapter[adapter] = by_adapter.get(adapter, 0) + num_tokens
        total = sum(by_adapter.values())
        others = total - by_adapter.pop(merged, 0)
        by_adapter.pop(None, None)
        branch = (others,) if others and merged is not None else ()
        return cls(total, (*by_adapter.values(), *branch), num_context)

    def features(self, short_lane: int) -> tuple[float, ...]:
        """How often each of `Costs` counts, as far as they are of a step's tokens."""
        short = [lane for lane in self.lanes if lane <= short_lane]
        num_short, short_tokens = len(short), sum(short)
        return (
            1.0,
            self.num_tokens,
            short_tokens,
            sum(self.lanes) - short_tokens,
            self.num_context,
            num_short,
            len(self.lanes) - num_short,
        )


def num_lanes(adapter: str | None, merged: str | None) -> int:
    """Lanes each token of a request takes: minus the merged adapter if that is another, plus its own if it has one."""
    if adapter == merged:
        return 0
    return (adapter is not None) + (merged is not None)


class CostModel:
    """Learns `Costs`: a step linear in (1, tokens, lane tokens, context tokens, adapters) with no negative coefficient,
    those of lanes and adapters being others for long lanes than for short ones.

    Online non-negative least squares: forgetting normal equations, coordinate descent from the last solution. No
    coefficient can be negative, so neither can an estimate, and a step never looks cheaper than one that lacks some of
    its lanes, or whose lanes are shorter and on the same side of the border.
    Before the first sample every estimate is 0: nothing is known, so nothing is assumed.
    """

    def __init__(self, short_lane: int = 0) -> None:
        """short_lane: tokens up to which a lane is short on this machine."""
        self._short_lane = short_lane
        self._gram = [[0.0] * _NUM for _ in range(_NUM)]
        self._moment = [0.0] * _NUM
        self._weights = [0.0] * _NUM
        self._switch_s: float | None = None
        self._back_s: float | None = None
        self._patches = self._encode_s = 0.0  # sums that forget
        self._costs = Costs(short_lane=short_lane)

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
        features = tuple(map(mul, size.features(self._short_lane), _UNITS))
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

    def observe_encoding(self, num_patches: float, seconds: float) -> None:
        """Learn from `seconds` in which so many patches were encoded."""
        self._patches = _FORGET * self._patches + num_patches
        self._encode_s = _FORGET * self._encode_s + seconds
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
        each = map(mul, self._weights, _UNITS)
        patch_s = self._encode_s / self._patches if self._patches else 0.0
        self._costs = Costs._make((*each, self.switch_s, self._back_s or 0.0, self._short_lane, patch_s))


def _smoothed(average: float | None, newest: float) -> float:
    return newest if average is None else (1 - _SMOOTH) * average + _SMOOTH * newest


# Of each feature, so that usual values are near 1, which keeps the descent well conditioned.
_UNITS = (1.0, 1 / 64, 1 / 64, 1 / 64, 1 / 4096, 1 / 8, 1 / 8)
_NUM = len(_UNITS)
