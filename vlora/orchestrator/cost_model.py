"""Predicts the time of steps and switches on this machine, learned from measured steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from operator import mul
from typing import NamedTuple

from vlora.types import Batch, Mode, StepResult

_FORGET = 0.96  # decay per new sample: the fit follows a machine that slows down within some seventy steps
_STANDARD_ERRORS = 2 * math.sqrt(1 - _FORGET)  # of the mean over the samples that the fit remembers
_SMOOTH = 0.2  # weight of the newest switch in the moving average
_SWEEPS = 4  # per sample; few suffice, since the fit starts from the last one
# Lanes before tokens: while every observed step was unmerged, the two costs cannot be separated. Time attributed to
# lanes encourages merging, and merged steps separate them; time attributed to tokens would never be corrected. Adapters
# before lanes, for the same reason: while no two requests shared an adapter, time attributed to adapters encourages
# running several requests of one adapter unmerged; merged steps would not separate these costs. Changes and modes
# before tokens: what a mode costs in addition ends it, and unmerged steps then separate it from a machine that slows
# down.
_SWEEP_ORDER = (7, 6, 4, 3, 10, 11, 8, 9, 1, 2, 0, 5)
_FORGOTTEN = 1e-12  # a feature decayed below this keeps its coefficient
_LEAST_BASE = 1 / 64  # of a step's time does not depend on its contents, also if all steps so far were alike
_LEAST_S, _MOST_S = 1e-6, 1e5  # of a measured time, so that squares and quotients are finite


class TokenThresholds(NamedTuple):
    """Numbers of tokens at which a CPU's kernels change, and with them the cost of a token; 0 where they do not change.

    Attributes:
        short_lane: the longest short lane. Short lanes are computed by another method than long ones
            (`atmm.strategies.hybrid`).
        hidden_tokens: the widest step that takes hardly longer than reading the weights.
        thin_tokens: the widest step that is computed by the kernels for few tokens (`atmm.matmul`).
    """

    short_lane: int = 0
    hidden_tokens: int = 0
    thin_tokens: int = 0


_ALIKE = TokenThresholds()


class Costs(NamedTuple):
    """Estimated costs of this machine in seconds.

    The tokens of one adapter are contiguous in a step. They form one lane, for which the adapter is read once. Short
    and long lanes have their own costs.

    Attributes:
        base_s: a step without tokens.
        token_s: a token of a step after the first `hidden_tokens`.
        thin_token_s: a token of a step among the first `thin_tokens`.
        lane_s: a token in a short lane.
        long_lane_s: a token in a long lane.
        context_token_s: a token of context.
        adapter_s: an adapter with a short lane.
        long_adapter_s: an adapter with a long lane.
        merged_step_s, mixed_step_s: a step of this mode, in addition to what the other costs explain.
        change_s: likewise a step for which other weights were put in place, besides `merge_s` and `back_s`.
        launched_s: likewise a step of which the host launches each kernel, where others are CUDA graphs. No step is
            predicted to be one.
        back_s: restoring W0; 0 where a shadow copy keeps both W0 and the last merged weights, so that switching between
            the two is free.
        patch_s: encoding an image patch, counted as in `VisionInput.num_patches`.
        short_lane, hidden_tokens, thin_tokens: see `TokenThresholds`.
        error: twice the standard error of predictions, relative to the time of a step.
    """

    base_s: float = 0.0
    token_s: float = 0.0
    thin_token_s: float = 0.0
    lane_s: float = 0.0
    long_lane_s: float = 0.0
    context_token_s: float = 0.0
    adapter_s: float = 0.0
    long_adapter_s: float = 0.0
    merged_step_s: float = 0.0
    mixed_step_s: float = 0.0
    change_s: float = 0.0
    launched_s: float = 0.0
    merge_s: float = 0.0
    back_s: float = 0.0
    patch_s: float = 0.0
    short_lane: int = 0
    hidden_tokens: int = 0
    thin_tokens: int = 0
    error: float = 0.0

    @property
    def thresholds(self) -> TokenThresholds:
        return TokenThresholds(self.short_lane, self.hidden_tokens, self.thin_tokens)

    @property
    def round_trip_s(self) -> float:
        """Restoring W0 and merging again; with a shadow copy only the changes of weights."""
        return 2 * self.change_s + (self.back_s + self.merge_s if self.back_s else 0.0)

    def merged_s(self, num_tokens: float, num_context: float, num_steps: float = 1.0) -> float:
        """Seconds of `num_steps` equal steps with these totals, without their lanes."""
        return self.base_s * num_steps + self.tokens_s(num_tokens, num_steps) + self.context_token_s * num_context

    def tokens_s(self, num_tokens: float, num_steps: float = 1.0) -> float:
        """Seconds that the tokens of `num_steps` equal steps add to these steps, without their lanes and context."""
        wide = num_tokens - self.hidden_tokens * num_steps
        thin = min(num_tokens, self.thin_tokens * num_steps)
        return (self.token_s * wide if wide > 0 else 0.0) + self.thin_token_s * thin

    def lanes_s(self, num_tokens: float, num_lanes: float = 1.0) -> float:
        """Seconds of `num_lanes` lanes of equal length with `num_tokens` tokens in total."""
        if num_tokens > self.short_lane * num_lanes:
            return self.long_adapter_s * num_lanes + self.long_lane_s * num_tokens
        return self.adapter_s * num_lanes + self.lane_s * num_tokens

    def step_s(self, size: StepSize) -> float:
        tokens_s = self.merged_s(size.num_tokens, size.num_context) if size.num_tokens else 0.0
        extra_s = self.mode_s(size.mode) + self.change_s * size.changed + self.launched_s * size.launched
        return tokens_s + sum(map(self.lanes_s, size.lanes)) + extra_s + self.patch_s * size.num_patches

    def mode_s(self, mode: Mode) -> float:
        return {Mode.MERGED: self.merged_step_s, Mode.MIXED: self.mixed_step_s}.get(mode, 0.0)


class StepSize(NamedTuple):
    """The contents of a step.

    Attributes:
        num_tokens: tokens computed.
        lanes: tokens per lane, one lane per distinct adapter that is read. The deLoRA branch of the merged adapter is a
            lane too, with all tokens of other adapters and of the base model.
        num_context: tokens with KV in place before the step, which is read.
        num_patches: image patches encoded in addition to the tokens.
        changed: other weights were put in place for this step.
        launched: see `StepResult`.
    """

    num_tokens: int
    lanes: tuple[int, ...]
    num_context: int
    num_patches: float = 0.0
    mode: Mode = Mode.UNMERGED
    changed: bool = False
    launched: bool = False

    @classmethod
    def of(cls, batch: Batch) -> StepSize:
        context = sum([item.start for item in batch.items])
        size = cls.holding([(item.adapter, item.num_tokens) for item in batch.items], batch.merged_adapter, context)
        return size if batch.encode is None else size._replace(num_patches=batch.encode.num_patches)

    @classmethod
    def holding(cls, items: Iterable[tuple[str | None, int]], merged: str | None, num_context: int) -> StepSize:
        """The size of a step with these items, given as (adapter, tokens) per request."""
        by_adapter: dict[str | None, int] = {}
        for adapter, num_tokens in items:
            by_adapter[adapter] = by_adapter.get(adapter, 0) + num_tokens
        total = sum(by_adapter.values())
        others = total - by_adapter.pop(merged, 0)
        by_adapter.pop(None, None)
        branch = (others,) if others and merged is not None else ()
        mode = Mode.UNMERGED if merged is None else Mode.MIXED if branch else Mode.MERGED
        return cls(total, (*by_adapter.values(), *branch), num_context, mode=mode)

    def features(self, at: TokenThresholds) -> tuple[float, ...]:
        """The factors of the linear model, in the order of the fields of `Costs` up to `launched_s`."""
        short = [lane for lane in self.lanes if lane <= at.short_lane]
        num_short, short_tokens = len(short), sum(short)
        return (
            1.0,
            max(0, self.num_tokens - at.hidden_tokens),
            min(self.num_tokens, at.thin_tokens),
            short_tokens,
            sum(self.lanes) - short_tokens,
            self.num_context,
            num_short,
            len(self.lanes) - num_short,
            self.mode is Mode.MERGED,
            self.mode is Mode.MIXED,
            self.changed,
            self.launched,
        )


def num_lanes(adapter: str | None, merged: str | None) -> int:
    """Lanes per token of a request.

    One subtracts the merged adapter, if that is another; one adds the request's own adapter, if it has one.
    """
    if adapter == merged:
        return 0
    return (adapter is not None) + (merged is not None)


class MergedAdapters(NamedTuple):
    """The adapters whose merged weights are available.

    Attributes:
        in_place: the adapter merged into the weights in place; None for W0.
        shadow: the adapter merged last, if a shadow copy keeps its weights: putting them in place is free.
    """

    in_place: str | None = None
    shadow: str | None = None

    def among(self, resident: Set[str]) -> MergedAdapters:
        """Without evicted adapters, whose merged weights are invalid."""
        return MergedAdapters(
            self.in_place if self.in_place in resident else None, self.shadow if self.shadow in resident else None
        )

    def after(self, batch: Batch, result: StepResult) -> MergedAdapters:
        merged, shadow = batch.merged_adapter, self.shadow
        if result.switched and merged is not None and merged != shadow:
            shadow = None if result.in_place else merged
        return MergedAdapters(merged, shadow)


class CostModel:
    """Learns `Costs` by online non-negative least squares.

    A step is linear in the features of `StepSize.features` with non-negative coefficients of least relative error. The
    absolute error would be dominated by steps with prompts, and by steps that another process has interrupted. The
    normal equations decay exponentially and are solved by coordinate descent from the last solution.

    Estimates are between 0 and the longest measured time per unit of their feature. A step is predicted to take at
    least 1/64 of the best constant prediction, and no less than one with a subset of its lanes, or with shorter lanes
    of the same class. Before the first sample every estimate is 0.
    """

    def __init__(self, thresholds: TokenThresholds = _ALIKE) -> None:
        self._thresholds = thresholds
        self._gram = [[0.0] * _NUM for _ in range(_NUM)]
        self._moment = [0.0] * _NUM
        self._weights = [0.0] * _NUM
        self._switch_s: float | None = None
        self._back_s: float | None = None
        self._patches = self._encode_s = 0.0  # exponentially decayed sums
        self._error = 0.0  # mean relative error of predictions, decayed likewise
        self._costs = Costs(**thresholds._asdict())

    @property
    def switch_s(self) -> float:
        """Predicted seconds to merge another adapter."""
        return self._switch_s or 0.0

    @property
    def costs(self) -> Costs:
        return self._costs

    def observe(self, batch: Batch, result: StepResult, before: MergedAdapters) -> float:
        """Learn from a step, its images and its switch from the merged weights that were available `before`.

        Returns the seconds that step and merge took longer than predicted.
        """
        late_s = 0.0
        if result.switched:
            if batch.merged_adapter is None:
                if result.in_place:
                    self.observe_back(result.switch_s)
            elif batch.merged_adapter != before.shadow:
                late_s = result.switch_s - self.switch_s
                self.observe_switch(result.switch_s)
        encode_s = 0.0
        if result.encoded is not None:
            encode_s = result.encoded.seconds
            self.observe_encoding(result.encoded.num_patches, encode_s)
        if batch.items and result.step_s > encode_s and not result.errors:
            # Measured separately, so that encoding time is never attributed to tokens.
            size = StepSize.of(batch)._replace(changed=result.switched, launched=result.launched, num_patches=0.0)
            late_s += result.step_s - encode_s - self._costs.step_s(size)
            self.observe_step(size, result.step_s - encode_s)
        return late_s

    def observe_step(self, size: StepSize, seconds: float) -> None:
        """Learn from a step that took `seconds`, switching excluded."""
        seconds = measured_s(seconds)
        if self._gram[0][0]:
            error = min(1.0, abs(1 - self._costs.step_s(size) / seconds))
            self._error = _FORGET * self._error + (1 - _FORGET) * error
        features = [f * unit / seconds for f, unit in zip(size.features(self._thresholds), FEATURE_SCALES, strict=True)]
        weights, moment = self._weights, self._moment
        for i, (row, feature) in enumerate(zip(self._gram, features, strict=True)):
            row[:] = [_FORGET * old + feature * other for old, other in zip(row, features, strict=True)]
            moment[i] = _FORGET * moment[i] + feature
        least = [_LEAST_BASE * moment[0] / self._gram[0][0], *[0.0] * (_NUM - 1)]
        for _ in range(_SWEEPS):
            for i in _SWEEP_ORDER:
                row = self._gram[i]
                if row[i] > _FORGOTTEN:
                    weights[i] = max(least[i], weights[i] + (moment[i] - sum(map(mul, row, weights))) / row[i])
        self._expect()

    def observe_encoding(self, num_patches: float, seconds: float) -> None:
        if num_patches > 0:
            self._patches = _FORGET * self._patches + num_patches
            self._encode_s = _FORGET * self._encode_s + measured_s(seconds)
            self._expect()

    def observe_switch(self, seconds: float) -> None:
        """Learn from a merge that took `seconds`."""
        self._switch_s = _smoothed(self._switch_s, seconds)
        self._expect()

    def observe_back(self, seconds: float) -> None:
        """Learn from a restore of W0 that took `seconds`. Not called where restoring is free."""
        self._back_s = _smoothed(self._back_s, seconds)
        self._expect()

    def _expect(self) -> None:
        each = map(mul, self._weights, FEATURE_SCALES)
        patch_s = self._encode_s / self._patches if self._patches else 0.0
        self._costs = Costs._make(
            (*each, self.switch_s, self._back_s or 0.0, patch_s, *self._thresholds, self._error * _STANDARD_ERRORS)
        )


def _smoothed(average: float | None, newest: float) -> float:
    newest = measured_s(newest)
    return newest if average is None else (1 - _SMOOTH) * average + _SMOOTH * newest


def measured_s(seconds: float) -> float:
    """A measured time as estimates use it: differences of a clock may be 0 or negative."""
    return min(max(_LEAST_S, seconds), _MOST_S)


# Feature scales: typical values are near 1, so that the descent is well conditioned.
FEATURE_SCALES = (1.0, 1 / 64, 1 / 8, 1 / 64, 1 / 64, 1 / 4096, 1 / 8, 1 / 8, 1.0, 1.0, 1.0, 1.0)
_NUM = len(FEATURE_SCALES)
