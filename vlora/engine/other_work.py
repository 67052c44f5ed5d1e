"""Work of the engine between two steps, beside requests: trainings, and products for clients of the base model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vlora.orchestrator.latency_promise import LatencyPromise

_HOLD_S = 1.0
_MAX_AHEAD_S = 1.0  # of a kind that could not run for long, so that it does not stop the other one for as long


class OtherWork(Protocol):
    """Work in pieces that cannot be interrupted. All calls come from the engine's thread, between two steps.

    Attributes:
        wake: Called from any thread when `advance` may have more to do; set by the step loop.
    """

    wake: Callable[[], None]

    def advance(self) -> bool:
        """Run one piece, if there is one that the promise allows. Returns whether to call again at once if idle."""

    @property
    def retry_s(self) -> float | None:
        """How long an idle engine may sleep before `advance` may run a piece; None until `wake` is called."""


class SharedWork(OtherWork, Protocol):
    """One kind of work among others.

    Attributes:
        waits: Whether the last call of `advance` ran no piece because of the promise.
        fits_later: Of a piece that waits: whether it may run before the engine has been idle for long.
    """

    waits: bool
    fits_later: bool


class WorkByTurns:
    """Two kinds of work, an `OtherWork`. While both have pieces, the one that has had less time comes first.

    A piece that waits for room keeps the other kind from using it up, unless it cannot run beside requests at all. It
    does so for half of the time only, in every other second, because there may never be enough room for it.
    """

    def __init__(
        self, first: SharedWork, second: SharedWork, promise: LatencyPromise, clock: Callable[[], float]
    ) -> None:
        """promise: both charge it with their pieces. clock: the engine's."""
        self.wake: Callable[[], None] = lambda: None
        self._kinds = (first, second)
        self._promise = promise
        self._clock = clock
        self._ahead_s = 0.0  # time of the first kind beyond that of the second one
        first.wake = second.wake = self._wake

    def advance(self) -> bool:
        behind = int(self._ahead_s > 0)  # the index of the kind that has had less time
        for place in (behind, 1 - behind):
            kind, before_s = self._kinds[place], self._promise.spent_s
            again = kind.advance()
            ahead_s = self._ahead_s + (1, -1)[place] * (self._promise.spent_s - before_s)
            self._ahead_s = min(_MAX_AHEAD_S, max(-_MAX_AHEAD_S, ahead_s))
            if again or (kind.waits and kind.fits_later and self._clock() % (2 * _HOLD_S) < _HOLD_S):
                return again
            if place == behind and not kind.waits:
                self._ahead_s = 0.0  # it has no claim on the time in which it does nothing
        return False

    @property
    def retry_s(self) -> float | None:
        return min((kind.retry_s for kind in self._kinds if kind.retry_s is not None), default=None)

    def _wake(self) -> None:
        self.wake()
