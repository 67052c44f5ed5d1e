"""Plans and packed copies: validation, refill, CUDA graphs, and the layout of a copy in its buffer."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from atmm import STRATEGIES, Factors, Lane, SegmentPlan, Site, SiteGroup, add_delta
from tests.atmm.cases import check_against_reference, check_group_against_reference, make_group, make_input, segments
from tests.example_counts import scaled

HALVES = segments({"a": 3, "b": 3})


@pytest.mark.parametrize(
    ("num_tokens", "lanes", "room", "words"),
    (
        *(
            (5, [Lane("a", start, stop)], None, rf"start={start}, stop={stop}.*batch of 5 tokens")
            for start, stop in ((-1, 2), (0, 6), (3, 2), (6, 6), (2, 99))
        ),
        *((5, [Lane("a", 0, 5, sign)], None, f"sign {sign}") for sign in (0.0, 0.5, -2.0, float("nan"))),
        (-1, [], None, "-1"),
        (4, segments({"a": 1, "b": 1, "c": 1}), 2, "3 lanes, up to 1 per token; the plan has room for 2"),
        (4, [Lane("a", 0, 5)], 2, "batch of 4 tokens"),
        (4, [Lane(key, 0, 4) for key in "abc"], 3, "up to 3 per token"),
    ),
)
def test_invalid_lanes_are_refused_and_change_nothing(
    num_tokens: int, lanes: list[Lane], room: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        SegmentPlan(num_tokens, lanes, room=room)
    if num_tokens >= 0:
        held = SegmentPlan(num_tokens, [Lane("a", 0, 2)], room=2 if room is None else room)
        with pytest.raises(ValueError, match=words):
            held.refill(lanes)
        assert held.lanes == (Lane("a", 0, 2),)


def test_empty_lanes_are_dropped() -> None:
    plan = SegmentPlan(5, [Lane("a", 2, 2), Lane("b", 0, 5)])
    assert plan.keys == {"b"} and plan.lanes == (Lane("b", 0, 5),)


ROOM_KEYS = "abc"


@st.composite
def fillings(draw: st.DrawFn) -> list[list[Lane]]:
    """Successive lanes of a plan of nine tokens with room for six lanes."""
    filled = []
    for _ in range(draw(st.integers(2, 4))):
        lanes, at = [], 0
        for key in draw(st.lists(st.sampled_from(ROOM_KEYS), max_size=5)):
            at += draw(st.integers(0, 1))
            stop = min(9, at + draw(st.integers(0, 4)))
            lanes.append(Lane(key, min(9, at), stop))
            at = stop
        if draw(st.booleans()):
            lanes.append(Lane(draw(st.sampled_from(ROOM_KEYS)), 0, draw(st.integers(0, 9)), -1.0))
        filled.append(lanes)
    return filled


@pytest.mark.slow
@settings(max_examples=scaled(100))
@given(fillings(), st.sampled_from([*STRATEGIES, None]), st.booleans())
def test_a_plan_with_room_computes_what_it_holds_now(
    filled: list[list[Lane]], strategy: str | None, packed: bool
) -> None:
    group = make_group({"a": 3, "b": 8, "c": 4}, missing=[("b", 1)], dtype=torch.float64)
    if packed:
        group.pack(ROOM_KEYS)
    elif strategy is not None:
        strategy = "loop"
    plan = SegmentPlan(9, filled[0], strategy, room=6)
    for lanes in filled:
        plan.refill(lanes)
        x, outputs = make_input(9, group, torch.float64)
        check_against_reference(group, plan, x, outputs)
        check_group_against_reference(group, plan, x, outputs)


def test_plans_without_room_and_adapters_that_are_not_packed_cannot_be_refilled() -> None:
    with pytest.raises(ValueError, match="without room"):
        SegmentPlan(4, []).refill([Lane("a", 0, 1)])
    group = make_group({"a": 4, "b": 8})
    group.pack("a")
    plan = SegmentPlan(4, [Lane("a", 0, 2)], room=2)
    check_against_reference(group, plan, *make_input(4, group, torch.float32))
    with pytest.raises(ValueError, match="adapters that are not packed: b"):
        plan.refill([Lane("b", 0, 2)])
    assert plan.lanes == (Lane("a", 0, 2),)


def test_tables_of_a_plan_are_copied_before_a_capture_never_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured copy would be repeated, at each replay, from host memory that is freed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group, plan = make_group({"a": 4, "b": 4}), SegmentPlan(6, HALVES)
    site = group.sites[0]
    with FakeTensorMode():
        x, y = (torch.empty(6, width, device="cuda") for width in (site.d_in, site.d_out))
    with pytest.raises(RuntimeError, match="run the step once before the capture"):
        add_delta(y, x, site, plan)
    prepared = plan.prepared[x.device, x.dtype] = Mock()
    add_delta(y, x, site, plan)
    prepared.assert_called_once_with(y, x, site, None)

    roomy, before = SegmentPlan(6, HALVES, room=4), Mock()
    roomy.prepared[torch.device("cuda"), torch.float32] = before
    with pytest.raises(RuntimeError, match="refill the plan between replays"):
        roomy.refill(segments({"a": 6}))
    assert roomy.keys == {"a", "b"} and list(roomy.prepared.values()) == [before]

    group.pack("ab")  # plans on a CPU are not affected
    check_against_reference(group, SegmentPlan(6, HALVES), *make_input(6, group, torch.float32))


# -- packed copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_packed_copy_has_the_factors_in_order_aligned_within_its_buffer(dtype: torch.dtype) -> None:
    group = make_group({"a": 4, "b": 3, "c": 5}, d_in=13, d_outs=(7, 9), missing=[("a", 1)], dtype=dtype)
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    num_bytes = group.packed_bytes("cab")
    group.pack("cab", memory[start : start + num_bytes])
    packed = group.packed
    assert packed is not None
    q, k = (site.factors for site in group.sites)
    assert torch.equal(packed.a, torch.cat([q["c"].a, q["a"].a, q["b"].a, k["c"].a, k["b"].a]))
    assert torch.equal(packed.bts[0], torch.cat([q["c"].bt, q["a"].bt, q["b"].bt]))
    assert torch.equal(packed.bts[1], torch.cat([k["c"].bt, k["b"].bt]))
    for tensor in (packed.a, *packed.bts):
        offset = tensor.data_ptr() - memory[start:].data_ptr()
        last = offset + ((tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]) * dtype.itemsize
        assert offset % 256 == 0 and tensor.stride(0) * dtype.itemsize % 16 == 0
        assert 0 <= offset < last <= num_bytes
    assert (memory[start + num_bytes :] == 0).all()
    plan = SegmentPlan(4, [Lane("a", 0, 2), Lane("b", 2, 4)])
    assert check_against_reference(group, plan, *make_input(4, group, dtype)) > 1
    group.unpack()
    assert group.packed is None
    memory.fill_(255)  # NaN in every float type
    assert check_against_reference(group, plan, *make_input(4, group, dtype)) > 1


def test_packing_nothing_needs_nothing_and_equal_packing_shares_one_layout() -> None:
    groups = [make_group({"a": 4, "b": 8}, seed=seed) for seed in range(3)]
    for keys in ("", "x"):
        assert groups[0].packed_bytes(keys) == 0
        groups[0].pack(keys)
        assert groups[0].packed is None
    for group, keys in zip(groups, ("ab", "ab", "ba"), strict=True):
        group.pack(keys)
    first, second, third = (group.packed.layout for group in groups if group.packed)
    assert first is second is not third


@pytest.mark.parametrize(
    ("keys", "buffer", "factors", "words"),
    (
        ("a", torch.zeros(64, dtype=torch.uint8), None, "has 64 bytes"),
        ("a", torch.zeros(1 << 14), None, "uint8"),
        ("a", torch.zeros(128, 128, dtype=torch.uint8), None, "one contiguous dimension"),
        ("a", torch.zeros(1 << 14, dtype=torch.uint8)[1:], None, "align"),
        ("aa", None, None, "duplicates"),
        ("ab", None, Factors(torch.zeros(4, 47), torch.zeros(4, 40)), r"a \(4, 47\)"),
        ("ab", None, Factors(torch.zeros(4, 48), torch.zeros(4, 41)), r"bt \(4, 41\)"),
        ("ab", None, Factors(torch.zeros(4, 48), torch.zeros(3, 40)), r"bt \(3, 40\)"),
        ("ab", None, Factors(torch.zeros(4, 48).half(), torch.zeros(4, 40).half()), "float16"),
        ("ab", None, Factors(torch.zeros(4, 48), torch.zeros(4, 40).half()), "float16"),
    ),
)
def test_what_cannot_be_packed_is_refused(
    keys: str, buffer: torch.Tensor | None, factors: Factors | None, words: str
) -> None:
    group = make_group({"a": 4, "b": 4})
    if factors is not None:
        group.sites[0].factors["b"] = factors
    with pytest.raises(ValueError, match=words):
        group.pack(keys, buffer)
    assert group.packed is None


def test_sites_of_a_group_read_one_tensor_and_have_one_group() -> None:
    taken = Site("o", 8, 8)
    SiteGroup([taken])
    bad: list[tuple[list[Any], str]] = [
        ([Site("q", 8, 8), Site("k", 9, 8)], "read the same tensor"),
        ([], "empty"),
        ([taken], "already belongs"),
    ]
    for sites, words in bad:
        with pytest.raises(ValueError, match=words):
            SiteGroup(sites)
