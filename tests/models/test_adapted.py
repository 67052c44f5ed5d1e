"""Lanes of a scope: one plan for as long as steps look alike, and never another step's."""

from __future__ import annotations

import torch
from torch import nn

from atmm import Factors, Lane
from vlora.models.adapted import LaneScope, adapt


def test_a_plan_serves_the_steps_that_look_alike_and_reads_what_is_loaded_now() -> None:
    scope = LaneScope()
    layer = adapt(nn.Linear(6, 4, bias=False), "layer", scope)
    x, plans = torch.randn(3, 6), []
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        plain = layer(x)
        for lanes, fresh in (
            ([Lane("a", 0, 2)], True),
            ([Lane("a", 0, 2)], False),
            ([Lane("a", 0, 2)], True),  # the same name, other weights
            ([Lane("a", 1, 3)], False),
            ([Lane("a", 1, 3, -1.0)], False),
            ([], False),
            ([Lane("a", 1, 3, -1.0)], False),
        ):
            if fresh:
                layer.site.factors["a"] = Factors(
                    torch.randn(2, 6, generator=generator), torch.randn(2, 4, generator=generator)
                )
            expected = plain.clone()
            for key, start, stop, sign in lanes:
                a, bt = layer.site.factors[key]
                expected[start:stop] += sign * (x[start:stop] @ a.T @ bt)
            with scope.lanes(3, lanes):
                plans.append(scope.plan_for(3))
                torch.testing.assert_close(layer(x), expected)
            assert scope.plan_for(3) is None
    assert plans[0] is plans[1] is plans[2] and plans[3] is not plans[2]
    assert plans[5] is None and plans[6] is plans[4]


def test_lanes_in_proportion_follow_their_plan() -> None:
    scope = LaneScope()
    for stop in (4, 8):
        with scope.lanes(8, [Lane("a", 0, stop)]):
            (lane,) = scope.plan_for(2).lanes  # type: ignore[union-attr]
            assert (lane.start, lane.stop) == (0, stop // 4)
