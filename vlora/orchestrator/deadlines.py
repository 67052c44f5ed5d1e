"""Deadlines: bounds on the time of a whole request, and the errors of missed and unreachable ones."""

from __future__ import annotations

import heapq
import itertools

from vlora.errors import DeadlineMissed, DeadlineUnreachable
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import ErrorValue

_FEW_ENDED = 8  # ended requests kept, with their images


class Deadlines:
    """Requests with a max_latency_s, in order of the latest time at which they may end.

    A request that ends earlier stays in the heap until its time has come, or until `discard_ended` removes it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TrackedRequest]] = []  # latest time, unique number, request
        self._numbers = itertools.count()

    def add(self, tracked: TrackedRequest) -> None:
        """Add a request. One without a max_latency_s is ignored."""
        max_latency_s = tracked.request.max_latency_s
        if max_latency_s is not None:
            heapq.heappush(self._heap, (tracked.arrival_s + max_latency_s, next(self._numbers), tracked))

    def pop_missed(self, now: float) -> list[TrackedRequest]:
        """Remove and return the unfinished requests that have missed their deadline, in order of arrival."""
        missed: list[TrackedRequest] = []
        while self._heap:
            tracked = self._heap[0][2]
            if not tracked.has_ended:
                if not tracked.expired(now):
                    break
                missed.append(tracked)
            heapq.heappop(self._heap)
        missed.sort(key=lambda t: t.arrival_s)
        return missed

    def discard_ended(self, num_unfinished: int) -> None:
        """Remove ended requests if they are the majority: an entry keeps its request's images in memory for hours.

        Args:
            num_unfinished: requests that have not ended, with or without a deadline.
        """
        if len(self._heap) > 2 * num_unfinished + _FEW_ENDED:
            self._heap = [entry for entry in self._heap if not entry[2].has_ended]
            heapq.heapify(self._heap)


def deadline_missed(tracked: TrackedRequest, now: float) -> ErrorValue:
    """The error of a request that has exceeded its max_latency_s."""
    return ErrorValue.of(
        DeadlineMissed(
            f"request {tracked.request_id!r} exceeded its max_latency_s of {tracked.request.max_latency_s:g} s: "
            f"{tracked.num_sampled} tokens were generated in {now - tracked.arrival_s:.3f} s"
        )
    )


def deadline_unreachable(tracked: TrackedRequest, needed_s: float, now: float) -> ErrorValue:
    """The error of a request whose first answer is predicted to take `needed_s`, too long for its deadline."""
    assert tracked.answer_by is not None
    left_s = max(0.0, tracked.answer_by - now)
    return ErrorValue.of(
        DeadlineUnreachable(
            f"the deadline cannot be met: the first answer of request {tracked.request_id!r} is predicted to take "
            f"{needed_s:.3f} s, and {left_s:.3f} s are left; retry later, or with a longer deadline"
        )
    )
