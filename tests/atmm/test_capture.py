"""Plans and the capture of CUDA graphs: tables are copied before a capture, never as a part of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from atmm import SegmentPlan, add_delta
from tests.atmm.cases import check_against_reference, make_group, make_input, segments


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_plan_is_not_prepared_while_a_graph_is_captured() -> None:
    """Its tables would be copied, at each replay, from host memory that is freed."""
    group = make_group({"a": 4, "b": 4})
    plan = SegmentPlan(6, segments({"a": 3, "b": 3}))
    site = group.sites[0]
    with FakeTensorMode():
        x, y = (torch.empty(6, width, device="cuda") for width in (site.d_in, site.d_out))
    with pytest.raises(RuntimeError, match="run the step once before the capture"):
        add_delta(y, x, site, plan)
    prepared = plan.prepared[x.device, x.dtype] = Mock()
    add_delta(y, x, site, plan)
    prepared.assert_called_once_with(y, x, site, None)


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
