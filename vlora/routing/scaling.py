"""Automatic scaling: the number of replicas that there should be. It has no clock and starts nothing."""

from __future__ import annotations

import math
from typing import NamedTuple

from vlora.routing.router import Advice

WAITING, BUSY, LEAST, LIGHT, FAILED = REASONS = ("waiting", "busy", "least", "light", "failed")
"""Why a number was changed: requests waited; no replica was lightly loaded; below the least number; the others have
room for all; a start failed."""

UP_AFTER_S, DOWN_AFTER_S = 2.0, 60.0

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Between a failed start and the next one, doubled with each failure in a row."""


class ScalingSettings(NamedTuple):
    """When replicas are added and released.

    Attributes:
        least, most: limits of the number.
        up_after_s: a replica is added when a request has waited for so long, or no replica was lightly loaded for so
            long. Not sooner after the last change or after an added replica joined.
        down_after_s: one is released when the others had room for all requests for so long, without a change.
    """

    least: int
    most: int
    up_after_s: float = UP_AFTER_S
    down_after_s: float = DOWN_AFTER_S


class Situation(NamedTuple):
    """The input of a decision.

    Attributes:
        number: replicas that there should be so far, without those that drain in order to end.
        starting: of these, added ones that do not serve yet, and lost ones that are started again.
        can_release: all but the last one serve.
        advice: of the router, now.
        longest_wait_s: how long a request has waited for a replica with room.
    """

    number: int
    starting: int
    can_release: bool
    advice: Advice
    longest_wait_s: float


class Decision(NamedTuple):
    """Another number of replicas. reason: one of `REASONS`; why: the same with its figures, for operators."""

    number: int
    reason: str
    why: str


class ScalingPolicy:
    """Adds replicas as soon as they are needed, and releases one at a time, once the load has been low for long.

    Hysteresis: a replica is wanted if none is lightly loaded; one is released only if the others would be lightly
    loaded with all requests (`Router.advice`). Times are in seconds, on any clock.
    """

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._pause_s = FIRST_PAUSE_S
        self._add_from = -math.inf
        self._busy_since = self._light_since = math.inf

    def decide(self, now: float, seen: Situation) -> Decision | None:
        """The number from now on; None to leave it. Call it every second or so."""
        least, most, up_after_s, down_after_s = self._settings
        late = seen.longest_wait_s >= up_after_s
        busy = seen.advice.add > 0
        light = seen.can_release and bool(seen.advice.release or seen.advice.drain) and not (busy or late)
        self._busy_since = min(self._busy_since, now) if busy else math.inf
        self._light_since = min(self._light_since, now) if light else math.inf
        more = min(max(seen.advice.add, int(late)) - seen.starting, most - seen.number)
        if now < self._add_from:
            more = 0
        if seen.number < least and now >= self._add_from:
            return self._decided(now, least, LEAST, f"at least {least} are to serve")
        if more > 0 and late:
            return self._decided(now, seen.number + more, WAITING, f"a request waited for {seen.longest_wait_s:.1f} s")
        if more > 0 and now - self._busy_since >= up_after_s:
            why = f"no replica was lightly loaded for {now - self._busy_since:.1f} s"
            return self._decided(now, seen.number + more, BUSY, why)
        if seen.number > least and not seen.starting and now - self._light_since >= down_after_s:
            why = f"the others had room for all requests for {now - self._light_since:.0f} s"
            return self._decided(now, seen.number - 1, LIGHT, why)
        return None

    def failed(self, now: float, number: int, cause: str) -> Decision:
        """A start has failed: go on with `number`, and add none for a time."""
        self.changed(now)
        self._add_from = now + self._pause_s
        why = f"{cause}; none is added for {self._pause_s:.0f} s"
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return Decision(number, FAILED, why)

    def joined(self, now: float) -> None:
        self._pause_s = FIRST_PAUSE_S
        self.changed(now)

    def changed(self, now: float) -> None:
        """After a change requests need time to be placed."""
        self._busy_since = self._light_since = math.inf
        self._add_from = max(self._add_from, now + self._settings.up_after_s)

    def _decided(self, now: float, number: int, reason: str, why: str) -> Decision:
        self.changed(now)
        return Decision(number, reason, why)
