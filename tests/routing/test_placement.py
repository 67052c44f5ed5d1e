"""Homes of adapters: by demand, within the slots, stable; the reactive plan beside the exact optimum."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from vlora.bench.cluster.decisions import makespan, reactive_exact
from vlora.routing import Group, MoveCosts, proactive, reactive
from vlora.simulator.popularity import power_law

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


@pytest.mark.parametrize(("num_replicas", "num_adapters", "num_requests"), [(3, 8, 60), (4, 16, 150)])
def test_the_reactive_plan_is_close_to_the_optimum(num_replicas: int, num_adapters: int, num_requests: int) -> None:
    groups, resident = crowd(num_replicas, num_adapters, num_requests)
    room = slots(num_replicas, 40)
    before = makespan(groups, [], resident, COSTS)
    shifts = reactive(groups, resident, room, COSTS)
    after = makespan(groups, shifts, resident, COSTS)
    optimum = reactive_exact(groups, resident, room, COSTS)
    assert makespan(groups, optimum.shifts, resident, COSTS) == pytest.approx(optimum.makespan_s)
    assert optimum.makespan_s <= after * (1 + 1e-6) and after <= 1.05 * optimum.makespan_s
    assert after < before
    assert {(shift.adapter, shift.source) for shift in shifts} <= {(group.adapter, group.replica) for group in groups}


def test_requests_of_many_replicas_move_once_each() -> None:
    groups, resident = crowd(32, 128, 1000)
    shifts = reactive(groups, resident, slots(32, 40), COSTS)
    there = {(group.adapter, group.replica): group.number for group in groups}
    moved: Counter[tuple[str | None, str]] = Counter()
    for shift in shifts:
        moved[shift.adapter, shift.source] += shift.number
    assert all(number <= there[key] for key, number in moved.items())
    level_s = 1000 * 0.4 / 32
    assert makespan(groups, [], resident, COSTS) > 3 * level_s
    assert makespan(groups, shifts, resident, COSTS) < 1.1 * level_s


def test_nothing_moves_without_a_gain_or_a_free_slot() -> None:
    crowded = [Group("x", "a", 10, 1.0)]
    assert reactive(crowded, {"a": {"x"}}, {"a": 1, "b": 1}, COSTS) == [("x", "a", "b", 4)]
    assert reactive(crowded, {"a": {"x"}, "b": {"y"}}, {"a": 1, "b": 1}, COSTS) == []
    assert reactive(crowded, {"a": {"x"}}, {"a": 1, "b": 1}, MoveCosts(load_s=20.0, again_s=0.0)) == []
    assert reactive([Group("x", "a", 10, 0.0)], {}, {"a": 1, "b": 1}, MoveCosts(0.0, 0.0)) == []
    level = [Group("x", "a", 5, 1.0), Group("x", "b", 5, 1.0)]
    assert reactive(level, {"a": {"x"}, "b": {"x"}}, {"a": 1, "b": 1}, COSTS) == []
