"""The exact optimum of a reactive plan, and the time at which the last replica finishes after a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from vlora.routing import Group, MoveCosts, Shift

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
