"""Homes of adapters by demand, the reactive plan beside a lower bound, and when replicas are added and released."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence, Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from vlora.routing import Group, MoveCosts, Need, Room, Router, Shift, proactive, reactive
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
from vlora.simulator.arrivals import power_law

COSTS = MoveCosts(load_s=0.16, again_s=0.05)


def rates(num_adapters: int, alpha: float = 1.0) -> dict[str, float]:
    return {f"x{place}": share for place, share in enumerate(power_law(num_adapters, alpha))}


def slots(num_replicas: int, number: int = 64) -> dict[str, int]:
    return {f"{place:04d}": number for place in range(num_replicas)}


@settings(max_examples=scaled(60), deadline=None)
@given(seed=st.integers(0, 10**9))
def test_no_replica_gets_more_adapters_than_it_has_slots(seed: int) -> None:
    draws = random.Random(seed)
    demand = {f"x{place}": draws.random() * draws.choice((0, 1, 10)) for place in range(draws.randint(0, 40))}
    room = {f"r{place}": draws.randint(0, 8) for place in range(draws.randint(0, 90))}
    now = {name: set(draws.sample(sorted(demand), min(3, len(demand)))) for name in room}
    placed = proactive(demand, room, now, most_homes=4)
    assert placed.keys() == room.keys()
    assert all(len(adapters) <= room[name] for name, adapters in placed.items())
    total = sum(demand.values())
    for adapter, rate in demand.items():
        homes = sum(adapter in adapters for adapters in placed.values())
        assert homes <= max(4, len(room) * rate / total if total else 0)
    missing = demand.keys() - {adapter for adapters in placed.values() for adapter in adapters}
    assert not missing or sum(map(len, placed.values())) == sum(min(number, len(demand)) for number in room.values())


def test_homes_follow_the_demand_and_loads_are_about_equal() -> None:
    demand = {"hot": 8.0, "warm": 2.0, **{f"cold{place}": 0.1 for place in range(60)}}
    placed = proactive(demand, slots(8), {})
    homes = {adapter: [name for name, each in placed.items() if adapter in each] for adapter in demand}
    assert len(homes["hot"]) == 4 and len(homes["warm"]) == 1
    assert all(len(names) == 1 for adapter, names in homes.items() if adapter.startswith("cold"))
    load = [sum(demand[adapter] / len(homes[adapter]) for adapter in adapters) for adapters in placed.values()]
    assert max(load) < 1.3 * sum(load) / len(load)


@pytest.mark.parametrize(("num_replicas", "num_adapters"), [(8, 128), (32, 128), (100, 1000)])
def test_few_adapters_move_when_a_replica_leaves_or_joins(num_replicas: int, num_adapters: int) -> None:
    demand, room = rates(num_adapters), slots(num_replicas)
    first = proactive(demand, room, {})
    again = proactive(demand, room, first)
    assert again == first, "without a change nothing moves"
    copies = sum(map(len, first.values()))
    less = {name: number for name, number in room.items() if name != "0003"}
    second = proactive(demand, less, first)
    moved = sum(len(second[name] - first[name]) for name in less)
    assert moved - len(first["0003"]) <= 0.2 * copies
    more = proactive(demand, slots(num_replicas + 1), first)
    moved = sum(len(more[name] - first[name]) for name in room)
    assert moved <= 0.05 * copies
    if num_replicas < 100:  # otherwise an average load differs too little
        assert sum(demand[adapter] for adapter in more[f"{num_replicas:04d}"]) > 0.3 / num_replicas


def crowd(num_replicas: int, num_adapters: int, num_requests: int) -> tuple[list[Group], dict[str, set[str]]]:
    """Requests of which most are on one home of their adapter."""
    draws = random.Random(4)
    demand = rates(num_adapters)
    resident = proactive(demand, slots(num_replicas, 40), {})
    counts: dict[tuple[str, str], int] = {}
    for _ in range(num_requests):
        adapter = draws.choices(list(demand), weights=list(demand.values()))[0]
        homes = [name for name in resident if adapter in resident[name]]
        replica = min(homes) if draws.random() < 0.7 else draws.choice(homes)
        counts[adapter, replica] = counts.get((adapter, replica), 0) + 1
    return [Group(adapter, replica, count, 0.4) for (adapter, replica), count in counts.items()], resident


def makespan(
    groups: Sequence[Group], shifts: Sequence[Shift], resident: Mapping[str, Set[str]], costs: MoveCosts
) -> float:
    """Seconds until the last replica finishes, after these shifts."""
    cost_s = {(group.adapter, group.replica): group.cost_s for group in groups}
    ends: dict[str, float] = {}
    for group in groups:
        ends[group.replica] = ends.get(group.replica, 0.0) + group.number * group.cost_s
    loaded: set[tuple[str, str]] = set()
    for shift in shifts:
        own_s = cost_s[shift.adapter, shift.source]
        ends[shift.source] -= shift.number * own_s
        ends[shift.target] = ends.get(shift.target, 0.0) + shift.number * (own_s + costs.again_s)
        if shift.adapter is not None and shift.adapter not in resident.get(shift.target, ()):
            loaded.add((shift.adapter, shift.target))
    for _, name in loaded:
        ends[name] += costs.load_s
    return max(ends.values())


@pytest.mark.parametrize(
    ("num_replicas", "num_adapters", "num_requests"),
    [(3, 8, 60), (4, 16, 150), (6, 20, 200), (8, 30, 400), (32, 128, 1000)],
)
def test_the_reactive_plan_is_close_to_the_optimum(num_replicas: int, num_adapters: int, num_requests: int) -> None:
    """No plan ends before all replicas do at once, without costs of moves. Each request moves once at most."""
    groups, resident = crowd(num_replicas, num_adapters, num_requests)
    shifts = reactive(groups, resident, slots(num_replicas, 40), COSTS)
    level_s = sum(group.number * group.cost_s for group in groups) / num_replicas
    assert makespan(groups, [], resident, COSTS) > 1.2 * level_s
    assert makespan(groups, shifts, resident, COSTS) < (1.06 if num_replicas < 32 else 1.1) * level_s
    there = {(group.adapter, group.replica): group.number for group in groups}
    moved: Counter[tuple[str | None, str]] = Counter()
    for shift in shifts:
        moved[shift.adapter, shift.source] += shift.number
    assert all(number <= there[key] for key, number in moved.items())


def test_nothing_moves_without_a_gain_or_a_free_slot() -> None:
    crowded = [Group("x", "a", 10, 1.0)]
    assert reactive(crowded, {"a": {"x"}}, {"a": 1, "b": 1}, COSTS) == [("x", "a", "b", 4)]
    assert reactive(crowded, {"a": {"x"}, "b": {"y"}}, {"a": 1, "b": 1}, COSTS) == []
    assert reactive(crowded, {"a": {"x"}}, {"a": 1, "b": 1}, MoveCosts(load_s=20.0, again_s=0.0)) == []
    assert reactive([Group("x", "a", 10, 0.0)], {}, {"a": 1, "b": 1}, MoveCosts(0.0, 0.0)) == []
    level = [Group("x", "a", 5, 1.0), Group("x", "b", 5, 1.0)]
    assert reactive(level, {"a": {"x"}, "b": {"x"}}, {"a": 1, "b": 1}, COSTS) == []


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
