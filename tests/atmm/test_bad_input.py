"""Invalid input raises an error with the argument's name before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import atmm
from atmm import STRATEGIES, Factors, HeadRows, Lane, SegmentPlan, add_delta, add_deltas, head_logits, merge
from atmm.gradients import delta_gradients
from atmm.shrink_expand import Expand, ExpandPart, Shrink, ShrinkPart
from tests.atmm.cases import check_against_reference, make_group, make_input, segments


@pytest.fixture(params=("compiled", "plain"), autouse=True)
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with the compiled kernels, and as on a machine without a compiler."""
    if request.param == "plain":
        for module in ("cpu.lanes", "operator"):
            monkeypatch.setattr(f"atmm.{module}.library", lambda: None)


BAD_TENSORS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]] = {
    "x of another batch": (lambda y, x: (y, x[:4]), r"x is \(4, 48\).*plan of 5 tokens"),
    "x of another layer": (lambda y, x: (y, x[:, :47]), r"x is \(5, 47\).*\[5, 48\]"),
    "x with one dimension": (lambda y, x: (y, x[0]), r"x is \(48,\)"),
    "y of another batch": (lambda y, x: (y[1:], x), r"y is \(4, .*plan of 5 tokens"),
    "y of another layer": (lambda y, x: (y[:, 1:], x), r"y is \(5, "),
    "y lies across": (lambda y, x: (y.t(), x), r"y is .*plan of 5 tokens expects \[5, "),
    "y with one dimension": (lambda y, x: (y.reshape(-1), x), r"y is .*plan of 5 tokens expects \[5, "),
    "y of one row for all": (lambda y, x: (y[:1].expand_as(y), x), r"y has strides \(0, 1\)"),
    "y of another dtype": (lambda y, x: (y.bfloat16(), x), r"y is torch.bfloat16 on cpu and x torch.float32 on cpu"),
    "y on another device": (lambda y, x: (y.to("meta"), x), r"y is torch.float32 on meta and x torch.float32 on cpu"),
    "both on another device": (lambda y, x: (y.to("meta"), x.to("meta")), r"x is torch.float32 on meta, .*adapter"),
    "both of another dtype": (lambda y, x: (y.bfloat16(), x.bfloat16()), r"x is torch.bfloat16 on cpu, .*adapter"),
    "unknown dtype": (lambda y, x: (y.int(), x.int()), r"x is torch.int32; deltas are computed in torch.float32"),
}


@pytest.mark.parametrize("whole", (False, True), ids=("site", "group"))
@pytest.mark.parametrize("packed", ("ab", ""))
@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_tensors_that_do_not_fit(bad: str, packed: str, whole: bool) -> None:
    corrupt, words = BAD_TENSORS[bad]
    group, plan = make_group({"a": 4, "b": 8}), SegmentPlan(5, segments({"a": 2, "b": 3}))
    group.pack(packed)
    x, outputs = make_input(5, group, torch.float32)
    y, x = corrupt(torch.cat(outputs, 1) if whole else outputs[0], x)
    before = y.clone()
    with pytest.raises(ValueError, match=words):
        if whole:
            add_deltas(y, x, group, plan)
        else:
            add_delta(y, x, group.sites[0], plan)
    assert y.is_meta or torch.equal(y, before)


BAD_FACTORS: dict[str, tuple[Callable[[Factors], Factors], str]] = {
    "ranks that differ": (lambda f: Factors(f.a, f.bt[:7]), r"'b' at site1 has a \(8, 48\) and bt \(7, 16\)"),
    "a of another layer": (lambda f: Factors(f.a[:, 1:], f.bt), r"a \(8, 47\)"),
    "bt of another layer": (lambda f: Factors(f.a, torch.zeros(8, 17)), r"bt \(8, 17\).*\[r, 16\]"),
    "bt of another dtype": (lambda f: Factors(f.a, f.bt.bfloat16()), r"bt in torch.bfloat16"),
    "both of another dtype": (lambda f: Factors(f.a.half(), f.bt.half()), r"x is torch.float32.*'b' torch.float16"),
    "a of one dimension": (lambda f: Factors(f.a[0], f.bt), r"a \(48,\)"),
    "on another device": (lambda f: Factors(f.a.to("meta"), f.bt.to("meta")), r"'b' torch.float32 on meta"),
}


@pytest.mark.parametrize("lengths", ({"a": 2, "b": 3}, {"a": 2, "b": 38}, {"b": 4, "a": 36}), ids=str)
@pytest.mark.parametrize("whole", (False, True), ids=("site", "group"))
@pytest.mark.parametrize("bad", BAD_FACTORS)
def test_factors_that_do_not_fit(bad: str, whole: bool, lengths: dict[str, int]) -> None:
    """Of short and of long lanes. In a group, the sites before the bad one are unchanged too."""
    corrupt, words = BAD_FACTORS[bad]
    group = make_group({"a": 4, "b": 8}, d_outs=(40, 16))
    group.sites[1].factors["b"] = corrupt(group.sites[1].factors["b"])
    plan = SegmentPlan(sum(lengths.values()), segments(lengths))
    x, outputs = make_input(plan.num_tokens, group, torch.float32)
    y = torch.cat(outputs, 1) if whole else outputs[1]
    before = y.clone()
    with pytest.raises(ValueError, match=words):
        if whole:
            add_deltas(y, x, group, plan)
        else:
            add_delta(y, x, group.sites[1], plan)
    assert torch.equal(y, before)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "fastest"])
def test_strategies_that_do_not_exist_or_need_a_packed_copy(strategy: str) -> None:
    group, plan = make_group({"a": 4, "b": 4}, dtype=torch.float16), SegmentPlan(2, [Lane("a", 0, 2)], strategy)
    x, outputs = make_input(2, group, torch.float16)
    for keys in ("", "b"):
        group.pack(keys)
        if strategy in ("loop", "divided"):
            check_against_reference(group, plan, x, outputs)
            continue
        words = f"'{strategy}' needs a packed copy of a for torch.float16 on cpu"
        with pytest.raises(ValueError, match=r"'fastest'.*loop, batched, stacked" if strategy == "fastest" else words):
            add_delta(outputs[0], x, group.sites[0], plan)


BAD_MERGES: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "ranks that differ": (lambda t: t.update(bt=t["bt"][:, :3]), r"bt \(2, 3, 6\)"),
    "factors the wrong way": (lambda t: t.update(a=t["bt"], bt=t["a"]), r"a \(2, 4, 6\).*give a"),
    "fewer factors": (lambda t: t.update(a=t["a"][:1]), r"a \(1, 4, 5\).*give a"),
    "two dimensions": (lambda t: t.update(base=t["base"][0], out=t["out"][0]), r"base \(6, 5\)"),
    "a of two dimensions": (lambda t: t.update(a=t["a"][0]), r"a \(4, 5\)"),
    "another out": (lambda t: t.update(out=t["out"][:, 1:]), r"out \(2, 5, 5\)"),
    "another dtype": (lambda t: t.update(a=t["a"].half()), r"a torch.float16.*give one dtype"),
    "another device": (lambda t: t.update(bt=t["bt"].to("meta")), r"bt on meta.*give one device"),
    "one row for all": (lambda t: t.update(out=t["out"][:, :1].expand(2, 6, 5)), r"out has strides \(30, 0, 1\)"),
    "unknown dtype": (lambda t: t.update({name: tensor.int() for name, tensor in t.items()}), "base is torch.int32"),
}


@pytest.mark.parametrize("bad", BAD_MERGES)
def test_merges_that_do_not_fit(bad: str) -> None:
    corrupt, words = BAD_MERGES[bad]
    shapes = {"out": (2, 6, 5), "base": (2, 6, 5), "a": (2, 4, 5), "bt": (2, 4, 6)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    corrupt(tensors)
    tensors["out"].fill_(7)
    with pytest.raises(ValueError, match=words):
        merge(tensors["out"], tensors["base"], tensors["a"], tensors["bt"])
    assert (tensors["out"] == 7).all()


def head(weight: Tensor, bias: Tensor | None = None, index: Any = (0,)) -> HeadRows:
    return HeadRows(weight, bias, torch.tensor(index))


WEIGHT = torch.zeros(3, 12)
BAD_HEADS = (
    (head(torch.zeros(3, 11)), r"rows\[1\]\.weight is \(3, 11\).*\[c, 12\]"),
    (head(WEIGHT.to("meta")), r"rows\[1\]\.weight .* on meta"),
    (head(WEIGHT, torch.zeros(4)), r"rows\[1\]\.bias is \(4,\)"),
    (head(WEIGHT, torch.zeros(3, device="meta")), r"rows\[1\]\.bias is \(3,\) .* on meta; give \[3\] .* on cpu"),
    (head(WEIGHT, index=(2, 7)), r"rows\[1\]\.index ranges from 2 to 7; h has rows 0 to 6"),
    (head(WEIGHT, index=(-1,)), r"rows\[1\]\.index ranges from -1 to -1"),
    (head(WEIGHT, index=(0.5,)), r"rows\[1\]\.index is \(1,\) in torch.float32"),
)


@pytest.mark.parametrize(("bad", "words"), BAD_HEADS)
def test_heads_that_do_not_fit(bad: HeadRows, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        head_logits(torch.zeros(7, 12), [head(WEIGHT), bad])
    with pytest.raises(ValueError, match=r"h is \(12,\)"):
        head_logits(torch.zeros(12), [head(WEIGHT)])


def test_separate_halves_gradients_and_norms_that_do_not_fit() -> None:
    group, lane = make_group({"a": 4}, d_in=16, d_outs=(8,)), Lane("a", 0, 3)
    site, (a, bt) = group.sites[0], group.sites[0].factors["a"]
    shrink, plan, x, g = Shrink([ShrinkPart(lane, a)], 3), SegmentPlan(3, [lane]), torch.zeros(3, 16), torch.zeros(3, 8)
    mixed, norm = [ShrinkPart(lane, a), ShrinkPart(lane, a.bfloat16())], r"expected contiguous \(8,\) torch.float32"
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: shrink(torch.zeros(2, 16)), r"\(2, 16\) values of torch.float32 do not fit 3 tokens"),
        (lambda: shrink(x.bfloat16()), r"factors of torch\.float32 in rows of 16; prepare"),
        (lambda: shrink(x[:, 1:]), r"\(3, 15\) values .*in rows of 16"),
        (lambda: Expand([ExpandPart(lane, bt, [0])], 3)(torch.zeros(4, 8), shrink(x)), "do not fit 3 tokens"),
        (lambda: Shrink(mixed, 3), r"factors of torch\.bfloat16 in rows of 16 and torch\.float32 in"),
        (lambda: delta_gradients(x.clone(), x, x, site, plan), r"site0: g has shape \(3, 16\)"),
        (lambda: delta_gradients(x.clone(), g, x.bfloat16(), site, plan), r"x is torch.bfloat16"),
        (lambda: atmm.rms_norm(g, torch.ones(7), 1e-6), norm),
        (lambda: atmm.rms_norm(g, torch.ones(8, dtype=torch.bfloat16), 1e-6), norm),
        (lambda: atmm.rms_norm(g, torch.ones(16)[::2], 1e-6), norm),
    ]
    for call, words in bad:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.skipif(not atmm.serves_attention(torch.device("cpu"), torch.float32), reason="no C++ compiler here")
@pytest.mark.parametrize("chunk", (False, True))
def test_attention_that_does_not_fit(chunk: bool) -> None:
    tokens, k, v = (3, torch.zeros(9, 32), torch.zeros(9, 32)) if chunk else (1, torch.zeros(9, 32), torch.zeros(9, 32))
    good: dict[str, Any] = {"out": torch.zeros(tokens, 4, 16), "q": torch.zeros(tokens, 4, 16), "k": k, "v": v}
    good |= {"places": torch.arange(tokens), "rows": torch.arange(3), "scale": 1.0}
    seen = torch.arange(1, 4)
    good |= {"seen": seen} if chunk else {"starts": torch.tensor([0, 3])}
    bad: list[tuple[dict[str, Tensor], str]] = [
        ({"k": k[:, :24], "v": v[:, :24]}, "does not fit"),
        ({"out": torch.zeros(tokens, 16, 4).transpose(1, 2)}, "contiguous"),
        ({"v": v.bfloat16()}, "types differ"),
        ({"v": v.t().contiguous().t()}, "strides"),
        ({"places": torch.arange(tokens, dtype=torch.int32)}, "int64"),
    ]
    bad += (
        [({"seen": seen[:2]}, "as many"), ({"seen": seen.int()}, "int64")]
        if chunk
        else [({"starts": torch.tensor([0])}, "starts")]
    )
    for change, words in bad:
        with pytest.raises(ValueError, match=words):
            (atmm.attend_chunk if chunk else atmm.attend)(**{**good, **change})
    assert not good["out"].any()
