"""The optimum of reactive co-migration as a mixed-integer programme: the yardstick of `vlora.routing.reactive`.

dLoRA's programme has a variable for each request; requests of one adapter on one replica are alike, so one for each
such group and target is enough. Solved with HiGHS through scipy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from vlora.routing import Group, MoveCosts, Shift

_GAP = 0.005  # of the optimum, at which the search ends


class Optimum(NamedTuple):
    """The best plan, the time at which its last replica finishes, and a lower bound of that time."""

    shifts: list[Shift]
    makespan_s: float
    bound_s: float


class _Rows:
    """The constraints of a programme, as rows of a sparse matrix."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def add(self, entries: Sequence[tuple[int, float]], least: float, most: float) -> None:
        """Add least <= sum of value * variable <= most, for entries (variable, value)."""
        for column, value in entries:
            self._rows.append(len(self._least))
            self._columns.append(column)
            self._values.append(value)
        self._least.append(least)
        self._most.append(most)

    def constraint(self, num_variables: int) -> LinearConstraint:
        matrix = coo_array((self._values, (self._rows, self._columns)), shape=(len(self._least), num_variables))
        return LinearConstraint(matrix.tocsr(), self._least, self._most)


def reactive_exact(
    groups: Sequence[Group],
    resident: Mapping[str, Set[str]],
    slots: Mapping[str, int],
    costs: MoveCosts,
    limit_s: float = 10.0,
) -> Optimum:
    """The same as `reactive`, optimal; after `limit_s` seconds the best plan found so far."""
    names, adapters = list(slots), sorted({group.adapter for group in groups}, key=str)
    num_replicas, num_moves = len(names), len(groups) * len(names)
    num_variables = num_moves + len(adapters) * num_replicas + 1  # moves, adapters on replicas, the makespan
    on = {
        (adapter, name): num_moves + k * num_replicas + j
        for k, adapter in enumerate(adapters)
        for j, name in enumerate(names)
    }
    rows = _Rows()
    for g, group in enumerate(groups):
        rows.add([(g * num_replicas + j, 1.0) for j in range(num_replicas)], group.number, group.number)
    for adapter in adapters:
        own = [g for g, group in enumerate(groups) if group.adapter == adapter]
        total = sum(groups[g].number for g in own)
        for j, name in enumerate(names):
            rows.add([*((g * num_replicas + j, 1.0) for g in own), (on[adapter, name], -total)], -np.inf, 0)
    for j, name in enumerate(names):
        held = resident.get(name, frozenset())
        new = [adapter for adapter in adapters if adapter is not None and adapter not in held]
        rows.add([(on[adapter, name], 1.0) for adapter in new], -np.inf, slots[name] - len(held))
        seconds = [
            (g * num_replicas + j, group.cost_s + (costs.again_s if group.replica != name else 0.0))
            for g, group in enumerate(groups)
        ]
        loads = [(on[adapter, name], costs.load_s) for adapter in new]
        rows.add([*seconds, *loads, (num_variables - 1, -1.0)], -np.inf, 0)
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
        constraints=rows.constraint(num_variables),
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
