"""What a step and a switch cost on this machine, learned from the steps that ran."""

from __future__ import annotations

_FORGET = 0.98  # weight of the past per new sample: the fit follows a machine that slows down within some fifty steps
_SMOOTH = 0.2  # weight of the newest switch in the moving average
_DOUBT = 1e3  # initial variance of the coefficients: the first samples decide


class CostModel:
    """Seconds of a step, linear in (1, tokens, tokens with a lane, context tokens), by recursive least squares.

    Before the first sample every estimate is 0: nothing is known, so nothing is assumed.
    """

    def __init__(self) -> None:
        self._weights = [0.0] * 4
        self._covariance = [[_DOUBT if i == j else 0.0 for j in range(4)] for i in range(4)]
        self._switch_s: float | None = None
        self._samples = 0

    @property
    def switch_s(self) -> float:
        """Expected seconds of merging another adapter."""
        return self._switch_s or 0.0

    def step_s(self, num_tokens: int, num_lane_tokens: int, num_context: int) -> float:
        """Expected seconds of a step, never negative."""
        if not self._samples:
            return 0.0
        features = _features(num_tokens, num_lane_tokens, num_context)
        return max(0.0, sum(w * x for w, x in zip(self._weights, features, strict=True)))

    def observe_step(self, num_tokens: int, num_lane_tokens: int, num_context: int, seconds: float) -> None:
        x = _features(num_tokens, num_lane_tokens, num_context)
        p = self._covariance
        px = [sum(row[j] * x[j] for j in range(4)) for row in p]
        scale = _FORGET + sum(x[i] * px[i] for i in range(4))
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        for i in range(4):
            self._weights[i] += px[i] / scale * error
        for i in range(4):
            for j in range(4):
                # Bounded, or directions that never vary (no lanes for an hour) would grow without end.
                p[i][j] = max(-_DOUBT, min(_DOUBT, (p[i][j] - px[i] * px[j] / scale) / _FORGET))
        self._samples += 1

    def observe_switch(self, seconds: float) -> None:
        self._switch_s = seconds if self._switch_s is None else (1 - _SMOOTH) * self._switch_s + _SMOOTH * seconds


def _features(num_tokens: int, num_lane_tokens: int, num_context: int) -> tuple[float, float, float, float]:
    # Scaled so that usual values are near 1, which keeps the recursion well conditioned.
    return 1.0, num_tokens / 64, num_lane_tokens / 64, num_context / 4096
