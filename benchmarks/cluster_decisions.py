"""CPU time of the router's decisions and plans, and how good the plans are."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from benchmarks.cluster_simulation import Row, row
from vlora.bench.report import Goal
from vlora.routing import RULES, Group, MoveCosts, Need, Report, Room, Router, Shift, proactive, reactive
from vlora.simulator.popularity import power_law

_GAP = 0.005  # of the optimum, at which the search ends


class Optimum(NamedTuple):
    """The best plan, the time at which its last replica finishes, and a lower bound of that time."""

    shifts: list[Shift]
    makespan_s: float
    bound_s: float


def reactive_exact(
    groups: Sequence[Group],
    resident: Mapping[str, Set[str]],
    slots: Mapping[str, int],
    costs: MoveCosts,
    limit_s: float = 10.0,
) -> Optimum:
    """The same as `reactive`, optimal; after `limit_s` seconds the best plan found so far.

    dLoRA's mixed-integer programme has a variable for each request; requests of one adapter on one replica are alike,
    so one for each such group and target is enough."""
    names, adapters = list(slots), sorted({group.adapter for group in groups}, key=str)
    num_replicas, num_moves = len(names), len(groups) * len(names)
    num_variables = num_moves + len(adapters) * num_replicas + 1  # moves, adapters on replicas, the makespan
    on = {
        (adapter, name): num_moves + k * num_replicas + j
        for k, adapter in enumerate(adapters)
        for j, name in enumerate(names)
    }
    constraints = lil_array((len(groups) + (len(adapters) + 2) * num_replicas, num_variables))
    bounds: list[tuple[float, float]] = []

    def add(entries: Sequence[tuple[int, float]], least: float, most: float) -> None:
        """Add least <= sum of value * variable <= most, for entries (variable, value)."""
        for variable, value in entries:
            constraints[len(bounds), variable] = value
        bounds.append((least, most))

    for g, group in enumerate(groups):
        add([(g * num_replicas + j, 1.0) for j in range(num_replicas)], group.number, group.number)
    for adapter in adapters:
        own = [g for g, group in enumerate(groups) if group.adapter == adapter]
        total = sum(groups[g].number for g in own)
        for j, name in enumerate(names):
            add([*((g * num_replicas + j, 1.0) for g in own), (on[adapter, name], -total)], -np.inf, 0)
    for j, name in enumerate(names):
        held = resident.get(name, frozenset())
        new = [adapter for adapter in adapters if adapter is not None and adapter not in held]
        add([(on[adapter, name], 1.0) for adapter in new], -np.inf, slots[name] - len(held))
        seconds = [
            (g * num_replicas + j, group.cost_s + (costs.again_s if group.replica != name else 0.0))
            for g, group in enumerate(groups)
        ]
        loads = [(on[adapter, name], costs.load_s) for adapter in new]
        add([*seconds, *loads, (num_variables - 1, -1.0)], -np.inf, 0)
    goal = np.zeros(num_variables)
    goal[-1] = 1.0
    goal[:num_moves] = 1e-6  # of equally good plans, one without needless moves
    integrality = np.ones(num_variables)
    integrality[-1] = 0
    most = np.full(num_variables, np.inf)
    most[num_moves:-1] = 1
    found = milp(
        goal,
        integrality=integrality,
        bounds=Bounds(np.zeros(num_variables), most),
        constraints=LinearConstraint(constraints.tocsr(), *zip(*bounds, strict=True)),
        options={"time_limit": limit_s, "mip_rel_gap": _GAP},
    )
    if found.x is None:
        return Optimum([], math.inf, 0.0)
    shifts = [
        Shift(group.adapter, group.replica, name, round(found.x[g * num_replicas + j]))
        for g, group in enumerate(groups)
        for j, name in enumerate(names)
        if name != group.replica and round(found.x[g * num_replicas + j])
    ]
    return Optimum(shifts, makespan(groups, shifts, resident, costs), float(found.mip_dual_bound))


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


DECISIONS, PLANS = "decisions", "plans"
_WAITING = 1000
_ROOM = Room(32, 8192, 64)
_MOVE = MoveCosts(load_s=0.16, again_s=0.05)
_REQUEST_S = 0.4
_BOUNDS_US = {2: 50.0, 1000: 100.0}
_LEAVES = "a replica leaves"
_REACTIVE = "co-migration"


def decisions(quick: bool) -> list[Row]:
    """Decisions of the rules with a queue, by number of replicas; then plans."""
    found = []
    for num_replicas in (2, 1000) if quick else (2, 16, 128, 1000):
        for name, rule in RULES.items():
            if rule.queues:
                found.append(_decisions(name, num_replicas, quick, None))
    found.append(_decisions("placed", 16, quick, {f"t{number}": 1.0 + number for number in range(8)}))
    for num_replicas, num_adapters in ((8, 128), (32, 128), (100, 1000), (1000, 10_000)):
        found += _proactive(num_replicas, num_adapters)
    for num_replicas, num_adapters in ((4, 32), (8, 128)) if quick else ((4, 32), (8, 128), (32, 128)):
        found.append(_co_migration(num_replicas, num_adapters, 5.0 if quick else 30.0))
    return found


def _percentiles_us(action: Callable[[int], Any], times: int) -> tuple[float, float]:
    spent = []
    for number in range(times):
        began = time.thread_time()
        action(number)
        spent.append(1e6 * (time.thread_time() - began))
    spent.sort()
    return spent[times // 2], spent[math.ceil(0.99 * times) - 1]


def _decisions(rule: str, num_replicas: int, quick: bool, tenant_weights: dict[str, float] | None) -> Row:
    """All replicas are full and 1,000 requests wait. One ends, which places the first, and another one arrives."""
    draws = random.Random(0)
    router = Router(rule, tenant_weights=tenant_weights)
    for place in range(num_replicas):
        router.join(f"{place:05d}", _ROOM)

    def need(number: int) -> Need:
        return Need(str(number), f"a{draws.randrange(1000)}", 16, number, tenant=f"t{number % 8}")

    total = 0
    while router.num_waiting < _WAITING:
        router.submit(need(total))
        total += 1
        if total % 5000 == 0:
            router.replan()
    running = [request_id for standing in router.replicas.values() for request_id in standing.holds]
    names = list(router.replicas)
    reported = Report(16, taken=10**9, ended=10**9)  # it includes everything that was sent

    def decide(number: int) -> None:
        place = draws.randrange(len(running))
        ((placed, _),) = router.ended(running[place])
        running[place] = placed.request_id
        router.submit(need(total + number))

    p50, p99 = _percentiles_us(decide, 1000 if quick else 10_000)
    report_us, _ = _percentiles_us(lambda number: router.report(names[number % len(names)], reported), 500)
    case = f"{_WAITING} waiting, a report {report_us:.0f} us" + ", 8 tenants' shares" * bool(tenant_weights)
    return row(DECISIONS, case, rule=rule, N=num_replicas, p50_us=p50, p99_us=p99)


def _proactive(num_replicas: int, num_adapters: int) -> list[Row]:
    """A plan, and the part of all copies that change their replica, beyond its own, when one leaves or joins."""
    demand = {f"a{place}": share for place, share in enumerate(power_law(num_adapters, 1.0))}
    slots = {f"{place:05d}": 64 for place in range(num_replicas)}
    began = time.thread_time()
    plan = proactive(demand, slots, {})
    took_s = time.thread_time() - began
    copies = sum(map(len, plan.values()))
    gone = f"{num_replicas // 2:05d}"
    less = {name: number for name, number in slots.items() if name != gone}
    left = proactive(demand, less, plan)
    moved = sum(len(left[name] - plan[name]) for name in less) - len(plan[gone])
    joined = proactive(demand, {**slots, "new": 64}, plan)
    also = sum(len(joined[name] - plan[name]) for name in slots)
    size = f"{num_adapters} adapters"
    return [
        row(PLANS, f"{size}, all placed", rule="placed", N=num_replicas, p50_us=1e6 * took_s),
        row(PLANS, f"{size}, {_LEAVES}", rule="placed", N=num_replicas, share=max(0, moved) / copies),
        row(PLANS, f"{size}, a replica joins", rule="placed", N=num_replicas, share=also / copies),
    ]


def _co_migration(num_replicas: int, num_adapters: int, limit_s: float) -> Row:
    """1,000 requests of which most are on one home of their adapter; share: how much later than at the optimum."""
    draws = random.Random(4)
    demand = {f"a{place}": share for place, share in enumerate(power_law(num_adapters, 1.0))}
    slots = {f"{place:05d}": 40 for place in range(num_replicas)}
    resident = proactive(demand, slots, {})
    counts: dict[tuple[str, str], int] = {}
    for adapter in draws.choices(list(demand), weights=list(demand.values()), k=1000):
        homes = sorted(name for name in slots if adapter in resident[name])
        replica = homes[0] if draws.random() < 0.7 else draws.choice(homes)
        counts[adapter, replica] = counts.get((adapter, replica), 0) + 1
    groups = [Group(adapter, replica, number, _REQUEST_S) for (adapter, replica), number in counts.items()]
    p50, p99 = _percentiles_us(lambda _: reactive(groups, resident, slots, _MOVE), 50)
    shifts = reactive(groups, resident, slots, _MOVE)
    before, after = (makespan(groups, each, resident, _MOVE) for each in ([], shifts))
    optimum = reactive_exact(groups, resident, slots, _MOVE, limit_s)
    case = f"{_REACTIVE}, {num_adapters} adapters: {before:.1f} -> {after:.1f} s, at best {optimum.makespan_s:.1f} s"
    off = after / optimum.makespan_s - 1
    return row(PLANS, case, rule="placed", N=num_replicas, p50_us=p50, p99_us=p99, share=off)


def decision_goals(found: Sequence[Row]) -> list[Goal]:
    """The bounds on CPU time, and on the quality of plans."""
    made = []
    for num_replicas, bound_us in _BOUNDS_US.items():
        worst = max(
            (each for each in found if each["part"] == DECISIONS and each["N"] == num_replicas),
            key=lambda each: each["p99 us"],
        )
        made.append(
            Goal(f"a decision, {num_replicas} replicas, p99, worst rule, us", worst["p99 us"], bound_us, at_most=True)
        )
    reactive_rows = [each for each in found if each["case"].startswith(_REACTIVE)]
    leaving = [each for each in found if each["case"].endswith(_LEAVES)]
    return [
        *made,
        Goal("co-migration, 1,000 requests, worst, ms", max(e["p50 us"] for e in reactive_rows) / 1e3, 5.0, True),
        Goal("co-migration, later than the optimum, worst", max(e["share"] for e in reactive_rows), 0.05, True),
        Goal("a replica leaves: moved copies of others, worst", max(e["share"] for e in leaving), 0.2, True),
    ]
