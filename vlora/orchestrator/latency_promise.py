"""How long the engine may do other work now, so that requests take at most `slowdown` times as long as without it.

Every request gets an allowance that grows with the time of serving steps since its arrival and shrinks with the time
of other work. A piece of other work runs beside requests only if it fits the allowance of each of them. The allowance
grows more slowly the busier the engine is, because stretched service also lets more requests run at a time. With n
steps a request, of a + b N seconds for N requests, and L arrivals a second, N is L times the duration R, so that
stretching steps by the factor f gives R = f n a / (1 - f u) with u = L n b: the share of time for the part of steps
that grows with the requests. R is thus multiplied by f (1 - u) / (1 - f u), which is `slowdown` for
f = slowdown / (1 + u (slowdown - 1)). Where requests wait for room in a batch, a is 0, and u is the share of steps.
A batch is full with `max_batch_size` requests, or with fewer where memory or a step's tokens limit it: with as many as
a step has served while others waited.

A request that has just arrived has earned nothing, and on a busy engine there is always one. So a part of what a short
request earns, (f - 1) times the duration that all but a few exceed, is granted at its arrival. The part is the share of
the batch that is empty: beside a full one requests would wait for the work that was granted to those before them.

An idle engine does not know when the next request arrives; it waits for one piece at most. A piece may therefore take
(slowdown - 1) times the usual duration of a request, or any time once no request has been seen for `QUIET_S`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from vlora.orchestrator.cost_model import measured_s

QUIET_S = 10.0
_WINDOW_S = 10.0  # time constant of the utilization; so long is a batch known to be limited
_SMOOTH = 0.05  # weight of the newest request in the usual duration
_RECENT = 200  # requests with a known duration
_SHORT = 0.05  # share of them that are shorter than a short request
_RECENT_PIECES = 64  # of one kind
_RARE = 0.05  # share of the pieces that take longer than expected


class _Arrival(NamedTuple):
    """earned_s, spent_s, num_steps: totals at a request's arrival. piece_s: of the piece that ran then. at_s: time."""

    earned_s: float
    spent_s: float
    num_steps: int
    piece_s: float
    at_s: float


class LatencyPromise:
    """Not thread-safe.

    Attributes:
        slowdown: Above 1. Infinity allows any piece at any time.
    """

    def __init__(self, slowdown: float, clock: Callable[[], float], max_batch_size: int) -> None:
        """clock: seconds, monotonic. max_batch_size: requests that a step serves at most."""
        self.slowdown = slowdown
        self._clock = clock
        self._max_batch_size = max_batch_size
        self._earned = 0.0  # allowance of a request since the start of the engine
        self._spent = 0.0  # time of other work since then
        self._num_steps = 0
        self._live: dict[str, _Arrival] = {}
        self._num_older = 0  # of the live requests, those that were there in the last step
        self._limit, self._limited_s = max_batch_size, -math.inf  # requests of a step beside which others waited; when
        self._recent_s: deque[float] = deque(maxlen=_RECENT)  # durations without other work
        self._short_s = 0.0
        self._piece_s = 0.0  # of the other work since the last step, during which a request may have arrived
        self._usual_s: float | None = None
        self._busy = 0.0
        self._num_live = 0.0  # of the last steps, in the mean
        self._began_s = self._updated_s = clock()
        self._last_s = -math.inf  # when the last request ended

    def add(self, request_id: str) -> None:
        """A request has arrived, possibly during the last piece."""
        self._live[request_id] = _Arrival(self._earned, self._spent, self._num_steps, self._piece_s, self._clock())

    def release(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        arrived = self._live.pop(request_id, None)
        if arrived is None:
            return
        self._num_older -= arrived.num_steps < self._num_steps
        self._last_s = self._clock()
        alone_s = max(0.0, self._last_s - arrived.at_s - (self._spent - arrived.spent_s))
        self._recent_s.append(alone_s)
        self._short_s = sorted(self._recent_s)[int(_SHORT * (len(self._recent_s) - 1))]
        before = alone_s if self._usual_s is None else self._usual_s
        self._usual_s = before + _SMOOTH * (alone_s - before)

    def served(self, seconds: float, shared_s: float = 0.0, num_served: int | None = None) -> None:
        """A step has served requests.

        Args:
            shared_s: The part of the duration that does not depend on the number of requests.
            num_served: Number of these requests; None: all. 0 for a step that only encodes images.
        """
        self._decay()
        seconds = max(0.0, seconds)
        if num_served is not None:
            if 0 < num_served < self._num_older:
                self._limit, self._limited_s = num_served, self._updated_s
            if num_served >= self._full:
                shared_s = 0.0
        self._busy += max(0.0, seconds - shared_s) / _WINDOW_S
        self._num_live += (len(self._live) - self._num_live) * (1 - math.exp(-seconds / _WINDOW_S))
        self._earned += (self._stretch - 1) * seconds
        self._piece_s = 0.0
        self._num_steps += 1
        self._num_older = len(self._live)

    def spent(self, seconds: float) -> None:
        """A piece of other work has run."""
        self._piece_s = max(0.0, seconds)
        self._spent += self._piece_s

    @property
    def utilization(self) -> float:
        """Share of the last seconds in the part of steps that grows with the number of requests."""
        self._decay()
        weight = 1 - math.exp((self._began_s - self._updated_s) / _WINDOW_S)  # of the time since the start
        return min(1.0, self._busy / weight) if weight > 0 else 1.0

    @property
    def room_s(self) -> float:
        """How long a piece may take now."""
        if math.isinf(self.slowdown):
            return math.inf
        if self._live:
            granted = self.granted_s
            return min(
                max(self._earned - one.earned_s, granted) - (self._spent - one.spent_s) - one.piece_s
                for one in self._live.values()
            )
        if self._usual_s is None or self.quiet_in_s == 0:
            return math.inf
        return self.usual_room_s

    @property
    def granted_s(self) -> float:
        """The part of its allowance that a request has at its arrival."""
        return (self._stretch - 1) * self._short_s * self._empty_share(len(self._live))

    @property
    def usual_allowance_s(self) -> float:
        """All that a usual request allows at the present load: longer pieces run in an idle engine only."""
        return math.inf if self._usual_s is None else (self._stretch - 1) * self._usual_s

    @property
    def beside_room_s(self) -> float:
        """How long a piece may take beside requests now and then, at the present load.

        The newest of N requests has run for 1 / (N + 1) of the usual duration, in the mean.
        """
        if self._usual_s is None:
            return math.inf
        granted_s = self._short_s * self._empty_share(self._num_live)
        return (self._stretch - 1) * max(granted_s, self._usual_s / (self._num_live + 1))

    @property
    def usual_room_s(self) -> float:
        """How long a piece may take while the engine is idle for a short time."""
        return math.inf if self._usual_s is None else (self.slowdown - 1) * self._usual_s

    @property
    def longest_s(self) -> float:
        """How long a piece may take at most that is to run before the engine has been idle for `QUIET_S`."""
        return min(self.usual_room_s, self.usual_allowance_s)

    @property
    def spent_s(self) -> float:
        """Time of other work since the start."""
        return self._spent

    @property
    def quiet_in_s(self) -> float:
        """How long the engine must remain idle until pieces may take any time."""
        return max(0.0, self._last_s + QUIET_S - self._clock())

    def _empty_share(self, num_live: float) -> float:
        return max(0.0, 1 - num_live / self._full)

    @property
    def _full(self) -> int:
        return self._limit if self._clock() - self._limited_s < _WINDOW_S else self._max_batch_size

    @property
    def _stretch(self) -> float:
        if math.isinf(self.slowdown):
            return 1.0  # the allowance is not used
        return self.slowdown / (1 + self.utilization * (self.slowdown - 1))

    def _decay(self) -> None:
        now = max(self._updated_s, self._clock())
        self._busy *= math.exp((self._updated_s - now) / _WINDOW_S)
        self._updated_s = now


class Piece(Protocol):
    """Pieces of one kind take time in proportion to `num_tokens`, or one time if it is 0."""

    @property
    def kind(self) -> Hashable: ...

    @property
    def num_tokens(self) -> int: ...


class PiecePrices:
    """Learns how long pieces take, by kind."""

    def __init__(self) -> None:
        self._recent: dict[Hashable, deque[float]] = {}

    def observe(self, piece: Piece, seconds: float) -> None:
        """Learn from a piece that took `seconds`."""
        self._recent.setdefault(piece.kind, deque(maxlen=_RECENT_PIECES)).append(
            measured_s(seconds) / max(1, piece.num_tokens)
        )

    def num_measured(self, kind: Hashable) -> int:
        return len(self._recent.get(kind, ()))

    def expected_s(self, piece: Piece) -> float:
        """An upper bound for most pieces; 0 before the first one of its kind."""
        recent = sorted(self._recent.get(piece.kind, (0.0,)))
        return recent[int((1 - _RARE) * (len(recent) - 1))] * max(1, piece.num_tokens)
