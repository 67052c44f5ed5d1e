"""Prompts beside those who decode, from adapters where they lie: short lanes and long ones are computed apart."""

from __future__ import annotations

import pytest
import torch

from atmm import Factors, Lane, SegmentPlan, add_delta, add_deltas, gains_from_copies
from atmm.divided import SHORT, Divided
from tests.atmm.cases import check_against_reference, make_group, make_input, segments
from tests.atmm.test_compiled import needs_compiler


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("lengths", ((1, SHORT, SHORT + 1, 40), (1, 1, 1, 64), (50, 30, 20, 9), (8, 8, 8, 8)), ids=str)
def test_short_and_long_lanes_agree_with_the_reference(
    lengths: tuple[int, ...], transposed: bool, dtype: torch.dtype
) -> None:
    group = make_group({"a": 3, "b": 8, "c": 17, "d": 64, "merged": 5}, missing=[("c", 0)], d_in=37, dtype=dtype)
    own = segments(dict(zip("abcd", lengths, strict=True)))
    num_tokens = sum(lengths) + 5  # some are the base model's
    for lanes in (own, [*own, Lane("merged", 0, num_tokens, -1.0)], [*own, Lane("merged", 3, 5, -1.0)]):
        plan = SegmentPlan(num_tokens, lanes)
        x, outputs = make_input(num_tokens, group, dtype)
        if transposed:
            x, outputs = x.t().contiguous().t(), [y.t().contiguous().t() for y in outputs]
        assert check_against_reference(group, plan, x, outputs) > 1
        assert all(isinstance(strategy, Divided) for strategy in plan.prepared.values())


@needs_compiler
@pytest.mark.parametrize("bad", ("short", "long"))
def test_nothing_is_added_where_either_kind_has_bad_factors(bad: str) -> None:
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
def test_copies_are_for_several_long_lanes() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    decoding = segments({f"a{place}": 1 for place in range(64)})
    beside_a_prompt = [*decoding, Lane("b", 64, 164)]
    assert not gains_from_copies(decoding, cpu, torch.bfloat16)
    assert not gains_from_copies(beside_a_prompt, cpu, torch.bfloat16)
    assert gains_from_copies([*beside_a_prompt, Lane("c", 164, 164 + SHORT + 1)], cpu, torch.bfloat16)
    assert gains_from_copies(decoding, meta, torch.bfloat16)  # where no kernel of ours reads adapters as they lie
