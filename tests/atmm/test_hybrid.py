"""Batches of prefill and decode with unpacked adapters: short and long lanes are computed separately."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atmm import Factors, Lane, SegmentPlan, add_delta, add_deltas, gains_from_copies, processor
from atmm.batch_stats import BatchStats
from atmm.dispatch import rule
from atmm.strategies import loop
from atmm.strategies.hybrid import SHORT, Hybrid, divides
from tests.atmm.cases import (
    check_against_reference,
    check_group_against_reference,
    make_group,
    make_input,
    segments,
)
from tests.atmm.test_cpu import needs_compiler


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("lengths", ((1, SHORT, SHORT + 1, 40), (1, 1, 1, 64), (50, 30, 20, 9), (8, 8, 8, 8)), ids=str)
def test_short_and_long_lanes_agree_with_the_reference(
    lengths: tuple[int, ...], transposed: bool, dtype: torch.dtype
) -> None:
    group = make_group({"a": 3, "b": 8, "c": 17, "d": 64, "merged": 5}, missing=[("c", 0)], d_in=37, dtype=dtype)
    own = segments(dict(zip("abcd", lengths, strict=True)))
    num_tokens = sum(lengths) + 5  # the last five use the base model
    for lanes in (own, [*own, Lane("merged", 0, num_tokens, -1.0)], [*own, Lane("merged", 3, 5, -1.0)]):
        plan = SegmentPlan(num_tokens, lanes)
        x, outputs = make_input(num_tokens, group, dtype)
        check_group_against_reference(group, plan, x, outputs, transposed)
        if transposed:
            x, outputs = x.t().contiguous().t(), [y.t().contiguous().t() for y in outputs]
        assert check_against_reference(group, plan, x, outputs) > 1
        assert all(isinstance(strategy, Hybrid) for strategy in plan.prepared.values())


@needs_compiler
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("together", (False, True))
def test_decoding_does_not_copy_transposed_outputs(together: bool, packed: bool) -> None:
    """Without long lanes, transposed outputs are not copied to row-major order."""
    group = make_group({"a": 4, "b": 8, "elsewhere": 0 if packed else 4})
    if packed:
        group.pack(["elsewhere"])  # the plan's adapters do not target this group
    plan = SegmentPlan(4, segments({"elsewhere": 4} if packed else {"a": 1, "b": 2, "elsewhere": 1}))
    x, outputs = make_input(4, group, torch.float32)
    y = torch.cat(outputs, 1).t().contiguous().t()
    parts = y.split([site.d_out for site in group.sites], 1)
    with _Called() as called:
        if together:
            add_deltas(y, x, group, plan)
        else:
            for site, part in zip(group.sites, parts, strict=True):
                add_delta(part, x, site, plan)
    assert not {name for name in called.names if "copy" in name or "clone" in name}


class _Called(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_one_plan_serves_sites_of_several_dtypes() -> None:
    """Including dtypes without compiled kernels, after others with them."""
    plan = SegmentPlan(49, segments({"short": 4, "long": 45}))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        group = make_group({"short": 4, "long": 8}, dtype=dtype)
        assert check_against_reference(group, plan, *make_input(49, group, dtype)) > 1


@needs_compiler
@pytest.mark.parametrize("bad", ("short", "long"))
def test_bad_factors_of_either_lane_kind_add_nothing(bad: str) -> None:
    group = make_group({"short": 4, "long": 8})
    last = group.sites[-1]
    last.factors[bad] = Factors(torch.randn(4, last.d_in), torch.randn(3, last.d_out))
    plan = SegmentPlan(40, segments({"short": 4, "long": 36}))
    x, outputs = make_input(40, group, torch.float32)
    y = torch.cat(outputs, 1)
    before = y.clone()
    with pytest.raises(ValueError, match=bad):
        add_deltas(y, x, group, plan)
    assert torch.equal(y, before)
    before = outputs[-1].clone()
    with pytest.raises(ValueError, match=bad):
        add_delta(outputs[-1], x, last, SegmentPlan(40, plan.lanes))
    assert torch.equal(outputs[-1], before)


@needs_compiler
@pytest.mark.parametrize("together", (False, True))
def test_factors_of_a_long_lane_are_checked_once_per_site(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(loop, "check_reads", lambda site, key, *_: looked.append(f"{site.name} {key}"))
    group = make_group({"short": 4, "long": 8})
    plan = SegmentPlan(40, segments({"short": 4, "long": 36}))
    x, outputs = make_input(40, group, torch.float32)
    if together:
        add_deltas(torch.cat(outputs, 1), x, group, plan)
    else:
        for site, y in zip(group.sites, outputs, strict=True):
            add_delta(y, x, site, plan)
    assert looked == [f"{site.name} long" for site in group.sites]


@needs_compiler
def test_the_rule_selects_divided_for_packed_short_and_long_lanes() -> None:
    group = make_group({key: 4 for key in "abcd"})
    group.pack("abcd")
    assert group.packed is not None
    for lengths, expected in (((1, 1, 1, 64), True), ((1, 1, 1, 2), False), ((64, 64, 64, 64), False)):
        plan = SegmentPlan(sum(lengths), segments(dict(zip("abcd", lengths, strict=True))))
        assert divides(plan.lanes) == expected
        assert (rule(BatchStats(plan, group.packed.layout)) == "divided") == expected


@needs_compiler
@pytest.mark.parametrize("fast", (True, False))
def test_copies_are_for_several_long_lanes_in_a_type_with_fast_products(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    decoding = segments({f"a{place}": 1 for place in range(64)})
    beside_a_prompt = [*decoding, Lane("b", 64, 164)]
    assert not gains_from_copies(decoding, cpu, torch.bfloat16)
    assert not gains_from_copies(beside_a_prompt, cpu, torch.bfloat16)
    prompts = [*beside_a_prompt, Lane("c", 164, 164 + SHORT + 1)]
    assert gains_from_copies(prompts, cpu, torch.bfloat16) == fast
    assert gains_from_copies(prompts, cpu, torch.float32)
    assert gains_from_copies(decoding, meta, torch.bfloat16)  # no compiled kernels on this device
