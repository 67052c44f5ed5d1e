"""When replicas are added and released: figures of a fake clock."""

from __future__ import annotations

from vlora.routing import Need, Room, Router
from vlora.routing.router import Advice
from vlora.routing.scaling import (
    BUSY,
    FAILED,
    FIRST_PAUSE_S,
    LEAST,
    LIGHT,
    LONGEST_PAUSE_S,
    WAITING,
    Decision,
    ScalingPolicy,
    ScalingSettings,
    Situation,
)

SETTINGS = ScalingSettings(2, 5, up_after_s=2.0, down_after_s=60.0)
CALM, MORE, LESS = Advice(0, (), ()), Advice(1, (), ()), Advice(0, (), ("r",))


def seen(number: int, advice: Advice = CALM, *, starting: int = 0, wait_s: float = 0.0, up: bool = True) -> Situation:
    return Situation(number, starting, up, advice, wait_s)


def decisions(policy: ScalingPolicy, times: range, situation: Situation) -> list[tuple[int, int, str]]:
    found = ((now, policy.decide(now, situation)) for now in times)
    return [(now, made.number, made.reason) for now, made in found if made is not None]


def test_a_replica_is_added_once_none_was_lightly_loaded_for_long() -> None:
    policy = ScalingPolicy(SETTINGS)
    assert decisions(policy, range(2), seen(2, MORE)) == []
    assert policy.decide(2, seen(2)) is None  # one was lightly loaded in between
    made = policy.decide(3, seen(2, MORE)) or policy.decide(4, seen(2, MORE)) or policy.decide(5, seen(2, MORE))
    assert made == Decision(3, BUSY, "no replica was lightly loaded for 2.0 s")


def test_a_request_that_waits_long_adds_a_replica_at_once() -> None:
    policy = ScalingPolicy(SETTINGS)
    assert policy.decide(0, seen(2, wait_s=1.9)) is None
    made = policy.decide(0, seen(2, wait_s=2.0))
    assert made == Decision(3, WAITING, "a request waited for 2.0 s")
    assert policy.decide(1, seen(3, wait_s=3.0, starting=1)) is None  # one is on its way
    assert policy.decide(3, seen(3, Advice(4, (), ()), wait_s=5.0, starting=1)) == Decision(
        5, WAITING, "a request waited for 5.0 s"
    )  # no more than the limit
    assert decisions(policy, range(4, 99), seen(5, MORE, wait_s=9.0)) == []


def test_after_a_change_requests_get_time_to_be_placed() -> None:
    policy = ScalingPolicy(SETTINGS)
    policy.joined(10)
    assert decisions(policy, range(10, 14), seen(3, MORE, wait_s=9.0))[0] == (12, 4, WAITING)


def test_one_replica_at_a_time_is_released_after_a_long_low_load() -> None:
    policy = ScalingPolicy(SETTINGS)
    assert decisions(policy, range(60), seen(4, LESS)) == []
    assert policy.decide(60, seen(4, LESS)) == Decision(3, LIGHT, "the others had room for all requests for 60 s")
    assert decisions(policy, range(61, 121), seen(3, LESS)) == []
    assert decisions(policy, range(121, 400), seen(3, Advice(0, ("idle",), ())))[0] == (121, 2, LIGHT)
    assert decisions(ScalingPolicy(SETTINGS), range(999), seen(2, LESS)) == []  # the least number


def test_a_moment_of_load_or_a_replica_that_is_down_postpones_a_release() -> None:
    for disturbance in (seen(4), seen(4, LESS, up=False), seen(4, LESS, wait_s=2.0, starting=9)):
        policy = ScalingPolicy(SETTINGS)
        assert decisions(policy, range(59), seen(4, LESS)) == []
        assert policy.decide(59, disturbance) is None
        assert decisions(policy, range(60, 121), seen(4, LESS)) == [(120, 3, LIGHT)]


def test_the_least_number_is_kept() -> None:
    assert ScalingPolicy(SETTINGS).decide(0, seen(1)) == Decision(2, LEAST, "at least 2 are to serve")


def test_failed_starts_are_tried_again_ever_more_rarely() -> None:
    policy, now, pauses = ScalingPolicy(SETTINGS), 0.0, []
    for _ in range(9):
        failed = policy.failed(now, 2, "no memory")
        assert failed[:2] == (2, FAILED) and failed.why.startswith("no memory; none is added for ")
        began, made = now, None
        while made is None:
            now += 1
            made = policy.decide(now, seen(2, MORE, wait_s=9.0))
        assert made[:2] == (3, WAITING)
        pauses.append(now - began)
    assert pauses[:4] == [FIRST_PAUSE_S, 20, 40, 80] and max(pauses) == pauses[-1] == LONGEST_PAUSE_S
    policy.joined(now)
    assert policy.failed(now, 2, "").why == "; none is added for 10 s"


def test_releases_and_additions_do_not_alternate_at_a_constant_load() -> None:
    """With the router's own advice, at any load: at most one change, or two in one direction."""
    for number in range(0, 40):
        router = Router("placed")
        for place in range(4):
            router.join(f"r{place}", Room(8, 1000))
        for arrival in range(number):
            router.submit(Need(f"{arrival}", None, 1, arrival))
        policy, replicas, directions = ScalingPolicy(ScalingSettings(1, 9, 2.0, 5.0)), 4, set()
        for now in range(100):
            made = policy.decide(now, seen(replicas, router.advice()))
            if made is None:
                continue
            directions.add(made.number > replicas)
            while replicas < made.number:
                router.join(f"r{replicas}", Room(8, 1000))
                replicas += 1
            if replicas > made.number:
                replicas -= 1
                for need in router.leave(f"r{replicas}"):
                    router.submit(need._replace(returned=True))
        assert len(directions) < 2, number
