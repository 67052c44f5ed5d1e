"""The latency promise in a simulated engine: a queue of requests, steps and pieces of other work, in virtual time."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest

from vlora.orchestrator.latency_promise import QUIET_S, LatencyPromise

STEP_S, NUM_STEPS = 0.01, 20  # of a request, whose steps nothing else shares


class Run(NamedTuple):
    """durations: of the requests, in order of arrival. other_s: time of other work. end_s: of the last request."""

    durations: list[float]
    other_s: float
    end_s: float

    @property
    def p99(self) -> float:
        return sorted(self.durations)[int(0.99 * len(self.durations))]


def simulate(load: float, slowdown: float | None, piece_s: float, num_requests: int = 3000, seed: int = 0) -> Run:
    """Random arrivals in one queue. slowdown: None runs no other work."""
    random_ = random.Random(seed)
    now = 0.0
    promise = LatencyPromise(slowdown or math.inf, lambda: now)
    arrivals: list[float] = []
    for _ in range(num_requests):
        arrivals.append((arrivals[-1] if arrivals else 0.0) + random_.expovariate(load / (STEP_S * NUM_STEPS)))
    queue: list[tuple[int, int]] = []  # request, steps left
    durations = [0.0] * num_requests
    following, other_s = 0, 0.0
    while following < num_requests or queue:
        while following < num_requests and arrivals[following] <= now:
            promise.add(str(following))
            queue.append((following, NUM_STEPS))
            following += 1
        if queue:
            request, left = queue.pop(0)
            now += STEP_S
            promise.served(STEP_S)
            if left > 1:
                queue.insert(0, (request, left - 1))
            else:
                promise.release(str(request))
                durations[request] = now - arrivals[request]
        if slowdown is not None and piece_s <= promise.room_s:
            now += piece_s
            other_s += piece_s
            promise.spent(piece_s)
        elif not queue and following < num_requests:
            now = max(now, arrivals[following])  # the quiet time is longer than these gaps
    return Run(durations, other_s, now)


@pytest.mark.parametrize(("load", "least"), [(0.3, 0.5), (0.6, 0.2), (0.9, 0.02)])
@pytest.mark.parametrize("slowdown", [1.15, 1.5])
def test_requests_take_at_most_the_promised_time(load: float, least: float, slowdown: float) -> None:
    """least: share of the time that other work gets, to show that there is some."""
    alone, beside = simulate(load, None, 0.0), simulate(load, slowdown, piece_s=0.005)
    assert 1 < beside.p99 / alone.p99 <= slowdown
    assert beside.other_s / beside.end_s > least


def test_other_work_without_a_promise_breaks_it() -> None:
    """Negative control: pieces after every step."""
    assert simulate(0.3, math.inf, 0.005).p99 > 1.5 * simulate(0.3, None, 0.0).p99


def test_a_piece_too_long_for_usual_requests_waits_for_quiet() -> None:
    now = -100.0
    promise = LatencyPromise(1.15, lambda: now)
    now = 0.0  # idle since long
    assert promise.room_s == math.inf, "no request was seen yet"
    promise.add("a")
    assert promise.room_s == 0
    for _ in range(10):
        now += 0.1
        promise.served(0.1)
    assert 0 < promise.room_s < 0.15
    promise.release("a")
    assert promise.room_s == pytest.approx(0.15)
    assert promise.quiet_in_s == QUIET_S
    now += QUIET_S - 1
    assert promise.room_s == pytest.approx(0.15) and promise.quiet_in_s == pytest.approx(1)
    now += 1
    assert promise.room_s == math.inf


def test_a_request_is_not_delayed_twice_by_the_piece_it_came_in() -> None:
    """It waited for the piece, so the next one must fit what its steps have earned since."""
    now = -100.0
    promise = LatencyPromise(1.5, lambda: now)
    now = 0.0  # idle since long
    for name, piece_s in (("at rest", 0.0), ("in a piece", 0.1)):
        promise.served(0.0)
        if piece_s:
            now += piece_s
            promise.spent(piece_s)
        promise.add(name)
        assert promise.room_s == pytest.approx(-piece_s)
        now += 0.1
        promise.served(0.1)
        assert promise.room_s == pytest.approx(0.05 - piece_s, abs=0.005)
        promise.release(name)


def test_the_oldest_requests_do_not_pay_for_the_newest() -> None:
    """A piece must fit the allowance of each request; a new one has none."""
    now = -100.0
    promise = LatencyPromise(1.5, lambda: now)
    now = 0.0  # idle since long
    promise.add("old")
    for _ in range(10):
        now += 0.1
        promise.served(0.1)
    before = promise.room_s
    assert before > 0.3
    promise.add("new")
    assert promise.room_s == 0
    promise.release("new")
    assert promise.room_s == pytest.approx(before)


def test_utilization_is_that_since_the_start_at_first() -> None:
    now = 0.0
    promise = LatencyPromise(1.5, lambda: now)
    for _ in range(10):
        now += 0.1
        promise.served(0.05)
    assert promise.utilization == pytest.approx(0.5, abs=0.05)


def test_a_promise_set_later_holds_from_then_on() -> None:
    """Time without a promise leaves no trace in the allowance."""
    now = -100.0
    promise = LatencyPromise(math.inf, lambda: now)
    now = 0.0
    promise.add("before")
    for _ in range(10):
        now += 0.2
        promise.served(0.1)
        promise.spent(0.1)
    promise.slowdown = 1.5
    assert promise.room_s < 0
    promise.release("before")
    promise.add("after")
    assert promise.room_s == pytest.approx(-0.1)
