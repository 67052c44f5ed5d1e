"""The latency promise in a simulated engine: a queue of requests, steps and pieces of other work, in virtual time."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest

from vlora.orchestrator.latency_promise import QUIET_S, LatencyPromise

NUM_STEPS = 20  # of a request


class Run(NamedTuple):
    """durations: of the requests, in order of arrival. other_s: time of other work. end_s: of the last request."""

    durations: list[float]
    other_s: float
    end_s: float

    @property
    def p99(self) -> float:
        return sorted(self.durations)[int(0.99 * len(self.durations))]


class Costs(NamedTuple):
    """shared_s, own_s: of a step, and of each of its requests. most: requests of a step."""

    shared_s: float
    own_s: float
    most: int

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.most / (NUM_STEPS * (self.shared_s + self.most * self.own_s))


ONE = Costs(0.0, 0.01, 1)
BATCHED = Costs(0.01, 0.0005, 32)


def simulate(load: float, slowdown: float | None, piece_s: float, costs: Costs = ONE, num_requests: int = 3000) -> Run:
    """Random arrivals at a share of the capacity. slowdown: None runs no other work."""
    random_ = random.Random(0)
    now = 0.0
    promise = LatencyPromise(slowdown or math.inf, lambda: now)
    arrivals: list[float] = []
    for _ in range(num_requests):
        arrivals.append((arrivals[-1] if arrivals else 0.0) + random_.expovariate(load * costs.capacity))
    left: dict[int, int] = {}  # steps of each request, the first ones run
    durations = [0.0] * num_requests
    following, other_s = 0, 0.0
    while following < num_requests or left:
        while following < num_requests and arrivals[following] <= now:
            promise.add(str(following))
            left[following] = NUM_STEPS
            following += 1
        if left:
            running = list(left)[: costs.most]
            step_s = costs.shared_s + costs.own_s * len(running)
            now += step_s
            promise.served(step_s, costs.shared_s if len(running) < costs.most else 0.0)
            for request in running:
                left[request] -= 1
                if not left[request]:
                    del left[request]
                    promise.release(str(request))
                    durations[request] = now - arrivals[request]
        if slowdown is not None and piece_s <= promise.room_s:
            now += piece_s
            other_s += piece_s
            promise.spent(piece_s)
        elif not left and following < num_requests:
            now = max(now, arrivals[following])  # the quiet time is longer than these gaps
    return Run(durations, other_s, now)


@pytest.mark.parametrize(
    ("costs", "load", "least"),
    [
        (ONE, 0.3, 0.5),
        (ONE, 0.6, 0.2),
        (ONE, 0.9, 0.02),
        (BATCHED, 0.03, 0.3),
        (BATCHED, 0.3, 0.05),
        (BATCHED, 0.6, 0.02),
        (BATCHED, 0.9, 0.0),
    ],
)
@pytest.mark.parametrize("slowdown", [1.15, 1.5])
def test_requests_take_at_most_the_promised_time(costs: Costs, load: float, least: float, slowdown: float) -> None:
    """least: share of the time that other work gets, to show that there is some."""
    alone, beside = simulate(load, None, 0.0, costs), simulate(load, slowdown, 0.005, costs)
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
