"""Plans and the capture of CUDA graphs: tables are copied before a capture, never as a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atmm import SegmentPlan, operator
from tests.atmm.cases import check_against_reference, make_group, make_input, segments


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_plan_is_not_prepared_while_a_graph_is_captured() -> None:
    """Its tables would be copied, at each replay, from host memory that is freed."""
    group = make_group({"a": 4, "b": 4})
    plan = SegmentPlan(6, segments({"a": 3, "b": 3}))
    x: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, is_cuda=True)
    with pytest.raises(RuntimeError, match="run the step once before the capture"):
        operator._strategy(plan, None, x, x, group.sites[0])
    prepared: Any = object()
    plan.prepared[x.device, x.dtype] = prepared
    assert operator._strategy(plan, None, x, x, group.sites[0]) is prepared, "a prepared plan is captured"


def test_a_plan_is_not_refilled_while_a_graph_is_captured() -> None:
    plan = SegmentPlan(6, segments({"a": 3, "b": 3}), room=4)
    before: Any = object()
    plan.prepared[torch.device("cuda"), torch.float32] = before
    with pytest.raises(RuntimeError, match="refill the plan between replays"):
        plan.refill(segments({"a": 6}))
    assert plan.keys == {"a", "b"} and list(plan.prepared.values()) == [before]


def test_a_capture_on_a_gpu_does_not_concern_plans_on_a_cpu() -> None:
    group = make_group({"a": 4, "b": 4})
    group.pack("ab")
    check_against_reference(group, SegmentPlan(6, segments({"a": 3, "b": 3})), *make_input(6, group, torch.float32))
