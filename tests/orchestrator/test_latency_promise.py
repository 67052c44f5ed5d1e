"""The latency promise in a simulated engine: a queue of requests, steps and pieces of other work, in virtual time."""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple

import pytest

from vlora.orchestrator.latency_promise import QUIET_S, LatencyPromise

NUM_STEPS = 20  # of a request


class Clocked(LatencyPromise):
    """A promise with a clock of its own, idle since long."""

    def __init__(self, slowdown: float, max_batch_size: int) -> None:
        self.now = -100.0
        super().__init__(slowdown, lambda: self.now, max_batch_size)
        self.now = 0.0

    def works(self, seconds: float, shared_s: float = 0.0, num_served: int | None = None) -> None:
        """Spend a step of these seconds on requests."""
        self.now += seconds
        self.served(seconds, shared_s, num_served)


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


def simulate(
    load: float,
    slowdown: float | None,
    piece_s: float,
    costs: Costs = ONE,
    num_requests: int = 3000,
    max_batch_size: int | None = None,
) -> Run:
    """Serve random arrivals at a share of the capacity.

    slowdown: None runs no other work. piece_s: of other work. max_batch_size: as the promise knows it, where another
    limit is lower.
    """
    now = 0.0
    promise = LatencyPromise(slowdown or math.inf, lambda: now, max_batch_size or costs.most)
    draws = random.Random(0)
    times = list(itertools.accumulate(draws.expovariate(load * costs.capacity) for _ in range(num_requests)))
    left: dict[int, int] = {}  # steps of each request, the first ones run
    durations = [0.0] * num_requests
    following, other_s = 0, 0.0
    while following < num_requests or left:
        while following < num_requests and times[following] <= now:
            promise.add(str(following))
            left[following] = NUM_STEPS
            following += 1
        if left:
            running = list(left)[: costs.most]
            step_s = costs.shared_s + costs.own_s * len(running)
            now += step_s
            promise.served(step_s, costs.shared_s, len(running))
            for request in running:
                left[request] -= 1
                if not left[request]:
                    del left[request]
                    promise.release(str(request))
                    durations[request] = now - times[request]
        if slowdown is not None and piece_s <= promise.room_s:
            now += piece_s
            other_s += piece_s
            promise.spent(piece_s)
        elif not left and following < num_requests:
            now = max(now, times[following])  # the quiet time is longer than these gaps
    return Run(durations, other_s, now)


@pytest.mark.parametrize(
    ("costs", "load", "slowdown", "least", "most"),
    [
        (ONE, 0.3, 1.5, 0.5, None),
        (ONE, 0.6, 1.15, 0.2, None),
        (ONE, 0.9, 1.5, 0.02, None),
        (BATCHED, 0.03, 1.15, 0.3, None),
        (BATCHED, 0.3, 1.5, 0.09, None),
        (BATCHED, 0.9, 1.5, 0.01, None),
        # Memory limits a batch: of 256 requests that a step may serve it serves 32.
        (BATCHED, 0.3, 1.15, 0.09, 256),
        (BATCHED, 0.6, 1.5, 0.05, 256),
        (BATCHED, 0.9, 1.15, 0.01, 256),
    ],
)
def test_requests_take_at_most_the_promised_time(
    costs: Costs, load: float, slowdown: float, least: float, most: int | None
) -> None:
    """least: share of the time that other work gets, close to what it gets today.

    Where memory limits a batch, the promise is shown to hold at each quantile.
    """
    alone, beside = simulate(load, None, 0.0, costs), simulate(load, slowdown, 0.005, costs, max_batch_size=most)
    assert 1 < beside.p99 / alone.p99 <= slowdown
    for share in (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99) if most else ():
        before, after = (sorted(run.durations)[int(share * len(run.durations))] for run in (alone, beside))
        assert after / before <= slowdown, share
    assert beside.other_s / beside.end_s > least


def test_a_batch_is_full_while_others_wait() -> None:
    """A limit that memory sets is forgotten once no request has waited for some time."""
    promise = Clocked(1.5, 16)
    promise.add("first")
    promise.works(1.0, 1.0, 1)
    promise.release("first")
    for name in ("a", "b", "c", "d"):
        promise.add(name)
    promise.served(0.1, 0.1, 2)
    assert promise.utilization == 0 and promise.granted_s > 0, "the others have only just arrived"
    promise.served(0.1, 0.1, 0)
    assert promise.granted_s > 0, "images were encoded"
    promise.served(0.1, 0.1, 2)
    assert promise.granted_s == 0 and promise.utilization == pytest.approx(0.1 / QUIET_S, rel=0.01)
    promise.now += 1.0
    for name in ("a", "b", "c"):
        promise.release(name)
    half = promise.granted_s
    assert half > 0, "one of two places is empty"
    promise.now += QUIET_S
    promise.served(0.1, 0.1, 1)
    assert promise.granted_s > 1.5 * half


def test_a_full_batch_grants_nothing_at_an_arrival() -> None:
    """Requests behind it would wait for the work that was granted to those before them."""
    promise = Clocked(1.5, 4)
    for name in ("a", "b"):
        promise.add(name)
        promise.works(1.0)
        promise.release(name)
    rooms = []
    for place in range(5):
        promise.add(f"r{place}")
        rooms.append(promise.room_s)
    full = (promise.slowdown / (1 + promise.utilization * (promise.slowdown - 1)) - 1) * 1.0
    assert rooms == pytest.approx([full * share for share in (0.75, 0.5, 0.25, 0.0, 0.0)])
    assert promise.usual_allowance_s == pytest.approx(full)


def test_other_work_without_a_promise_breaks_it() -> None:
    """Negative control: pieces after every step."""
    assert simulate(0.3, math.inf, 0.005).p99 > 1.5 * simulate(0.3, None, 0.0).p99


def test_a_piece_too_long_for_usual_requests_waits_for_quiet() -> None:
    promise = Clocked(1.15, 1)
    assert promise.room_s == math.inf, "no request was seen yet"
    promise.add("a")
    assert promise.room_s == 0
    for _ in range(10):
        promise.works(0.1)
    assert 0 < promise.room_s < 0.15
    promise.release("a")
    assert promise.room_s == pytest.approx(0.15)
    assert promise.quiet_in_s == QUIET_S
    promise.now += QUIET_S - 1
    assert promise.room_s == pytest.approx(0.15) and promise.quiet_in_s == pytest.approx(1)
    promise.now += 1
    assert promise.room_s == math.inf


def test_a_request_is_not_delayed_twice_by_the_piece_it_came_in() -> None:
    """It waited for the piece, so the next one must fit what its steps have earned since."""
    promise = Clocked(1.5, 1)
    for name, piece_s in (("at rest", 0.0), ("in a piece", 0.1)):
        promise.served(0.0)
        if piece_s:
            promise.now += piece_s
            promise.spent(piece_s)
        promise.add(name)
        assert promise.room_s == pytest.approx(-piece_s)
        promise.works(0.1)
        assert promise.room_s == pytest.approx(0.05 - piece_s, abs=0.005)
        promise.release(name)


def test_the_oldest_requests_do_not_pay_for_the_newest() -> None:
    """A piece must fit the allowance of each request; a new one has none."""
    promise = Clocked(1.5, 1)
    promise.add("old")
    for _ in range(10):
        promise.works(0.1)
    before = promise.room_s
    assert before > 0.3
    promise.add("new")
    assert promise.room_s == 0
    promise.release("new")
    assert promise.room_s == pytest.approx(before)


def test_utilization_is_that_since_the_start_at_first() -> None:
    now = 0.0
    promise = LatencyPromise(1.5, lambda: now, 1)
    for _ in range(10):
        now += 0.1
        promise.served(0.05)
    assert promise.utilization == pytest.approx(0.5, abs=0.05)


def test_a_promise_set_later_holds_from_then_on() -> None:
    """Time without a promise leaves no trace in the allowance."""
    promise = Clocked(math.inf, 1)
    promise.add("before")
    for _ in range(10):
        promise.now += 0.2
        promise.served(0.1)
        promise.spent(0.1)
    promise.slowdown = 1.5
    assert promise.room_s < 0
    promise.release("before")
    promise.add("after")
    assert promise.room_s == pytest.approx(-0.1)
