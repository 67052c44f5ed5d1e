"""Adds and releases replicas of a cluster as `ScalingPolicy` decides, unless an operator has set their number."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from vlora.errors import VLoraError
from vlora.routing.scaling import REASONS, Decision, ScalingPolicy, ScalingSettings, Situation
from vlora.types.replicas import ScalingStatus

log = logging.getLogger("vlora.cluster")

PERIOD_S = 1.0
START_S = 900.0
"""A replica that has not joined after so many seconds has failed to start. Large models take minutes to load."""

_OPERATOR = "operator"
SCALING_REASONS = (*REASONS, _OPERATOR)


class Autoscaler:
    """Follows the policy once a second.

    A start that fails is given up, and the next one waits: nothing is started again and again.
    """

    def __init__(
        self,
        scaled: Any,
        settings: ScalingSettings,
        clock: Callable[[], float],
        *,
        automatic: bool,
        start_s: float = START_S,
    ) -> None:
        """Begin with the present number of replicas. scaled: a `RayCluster`."""
        self.automatic = automatic
        self._scaled = scaled
        self._settings = settings
        self._clock = clock
        self._start_s = start_s
        self._policy = ScalingPolicy(settings)
        self._target = scaled.number
        self._reached = True
        self._starting: dict[int, float] = {}  # since when, by place
        self._counts: Counter[str] = Counter()
        self._last = ""
        self._last_s = -math.inf
        self._problem = ""

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Follow the policy until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.tick()
            except Exception:  # of one round; the next one may succeed
                log.exception("automatic scaling failed once; it goes on")

    async def tick(self) -> None:
        scaled, now = self._scaled, self._clock()
        if not self.automatic or scaled.in_operation:
            return
        absent = scaled.absent()
        self._look_at_starts(now, absent)
        restarting = {place for place, error in absent.items() if place < self._target and not error}
        seen = Situation(
            number=self._target,
            starting=len(restarting | self._starting.keys()),
            can_release=scaled.serves(self._target - 1),
            advice=scaled.advice(),
            longest_wait_s=scaled.longest_wait_s(),
        )
        if (decision := self._policy.decide(now, seen)) is not None:
            self._follow(now, decision)
        if self._reached:
            return
        before = scaled.absent()
        try:
            self._reached = await scaled.advance(self._target)
        except VLoraError as error:  # as when none that would remain serves
            if self._target != scaled.number:  # otherwise the change has begun, and goes on later
                log.warning("automatic scaling to %d replicas: %s", self._target, error)
                self._target, self._reached = scaled.number, True
            return
        for place in scaled.absent().keys() - before.keys():
            self._starting[place] = now

    def set_by_operator(self, number: int) -> None:
        if self.automatic or number != self._scaled.number:
            self._note(Decision(number, _OPERATOR, "set by an operator"))
        self.automatic = False
        self._starting.clear()
        self._problem = ""

    def take_over(self, before: ScalingStatus) -> None:
        """Go on in place of another one."""
        self._target, self._reached, self.automatic = before.number, False, before.automatic
        self._last, self._last_s = before.decision, self._clock() - (before.decided_s or 0.0)
        self._counts = Counter(before.decisions)

    def turn_on(self) -> None:
        """Change the number automatically from now on, beginning with the present one."""
        if not self.automatic:
            self.automatic = True
            self._policy = ScalingPolicy(self._settings)
            self._policy.changed(self._clock())
            self._target, self._reached = self._scaled.number, False

    @property
    def status(self) -> ScalingStatus:
        return ScalingStatus(
            automatic=self.automatic,
            number=self._scaled.number,
            least=self._settings.least,
            most=self._settings.most,
            decision=self._last,
            decided_s=None if not self._last else self._clock() - self._last_s,
            problem=self._problem,
            decisions={reason: self._counts[reason] for reason in SCALING_REASONS},
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _look_at_starts(self, now: float, absent: Mapping[int, str]) -> None:
        for place in [place for place in self._starting if place not in absent]:
            del self._starting[place]
            self._problem = ""
            self._policy.joined(now)
        failed = [place for place in self._starting if absent[place]]
        late = [place for place, since in self._starting.items() if now - since > self._start_s]
        if not failed and not late:
            return
        for place in failed:
            log.warning("automatic scaling: %s", absent[place])
        # Any client sees the status, and an error may contain paths.
        what = "a replica did not start; see the server log" if failed else f"no start within {self._start_s:g} s"
        given_up = {*failed, *late}
        # Starts above go along. A replica that has served is not given up, nor is a start below one.
        number = self._target
        while number > max(self._settings.least, min(given_up)) and number - 1 in self._starting:
            number -= 1
        self._starting = {
            place: since for place, since in self._starting.items() if place < number and place not in given_up
        }
        decision = self._policy.failed(now, number, what)
        self._problem = decision.why
        log.warning("automatic scaling: %s", decision.why)
        self._follow(now, decision)

    def _follow(self, now: float, decision: Decision) -> None:
        self._note(decision)
        self._target, self._reached = decision.number, False

    def _note(self, decision: Decision) -> None:
        self._counts[decision.reason] += 1
        before = self._scaled.number
        change = "as before" if decision.number == before else f"instead of {before}"
        self._last = f"{decision.number} {change}: {decision.why}"
        self._last_s = self._clock()
        log.info("replicas: %s", self._last)
