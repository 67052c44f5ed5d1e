"""Invalid input raises an error with the argument's name before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atmm import Factors, HeadRows, Lane, SegmentPlan, add_delta, add_deltas, head_logits, merge
from tests.atmm.cases import make_group, make_input, segments


@pytest.fixture(params=("compiled", "plain"), autouse=True)
def _twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with the compiled kernels, and as on a machine without a compiler."""
    if request.param == "plain":
        for module in ("cpu.lanes", "operator"):
            monkeypatch.setattr(f"atmm.{module}.library", lambda: None)


def plan(strategy: str | None = None) -> SegmentPlan:
    return SegmentPlan(5, segments({"a": 2, "b": 3}), strategy)


BAD_TENSORS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]] = {
    "x of another batch": (lambda y, x: (y, x[:4]), r"x is \(4, 48\).*plan of 5 tokens"),
    "x of another layer": (lambda y, x: (y, x[:, :47]), r"x is \(5, 47\).*\[5, 48\]"),
    "x with one dimension": (lambda y, x: (y, x[0]), r"x is \(48,\)"),
    "y of another batch": (lambda y, x: (y[1:], x), r"y is \(4, .*plan of 5 tokens"),
    "y of another layer": (lambda y, x: (y[:, 1:], x), r"y is \(5, "),
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
    group = make_group({"a": 4, "b": 8})
    group.pack(packed)
    x, outputs = make_input(5, group, torch.float32)
    y, x = corrupt(torch.cat(outputs, 1) if whole else outputs[0], x)
    before = y.clone()
    with pytest.raises(ValueError, match=words):
        if whole:
            add_deltas(y, x, group, plan())
        else:
            add_delta(y, x, group.sites[0], plan())
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


@pytest.mark.parametrize("num_tokens", (5, 40))  # 40 is more than the compiled kernels support
@pytest.mark.parametrize("whole", (False, True), ids=("site", "group"))
@pytest.mark.parametrize("bad", BAD_FACTORS)
def test_factors_that_do_not_fit(bad: str, whole: bool, num_tokens: int) -> None:
    corrupt, words = BAD_FACTORS[bad]
    group = make_group({"a": 4, "b": 8}, d_outs=(40, 16))
    group.sites[1].factors["b"] = corrupt(group.sites[1].factors["b"])
    x, outputs = make_input(num_tokens, group, torch.float32)
    lanes = SegmentPlan(num_tokens, segments({"a": 2, "b": num_tokens - 2}))
    y = torch.cat(outputs, 1) if whole else outputs[1]
    before = y.clone()
    with pytest.raises(ValueError, match=words):
        if whole:
            add_deltas(y, x, group, lanes)
        else:
            add_delta(y, x, group.sites[1], lanes)
    assert torch.equal(y, before)  # in a group, the sites before the bad one are unchanged too


@pytest.mark.parametrize("lane", (Lane("a", 3, 6), Lane("a", -1, 2), Lane("a", 4, 2)), ids=str)
def test_segments_past_the_end(lane: Lane) -> None:
    with pytest.raises(ValueError, match=r"lane Lane.*batch of 5 tokens"):
        SegmentPlan(5, [lane])


BAD_MERGES: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "ranks that differ": (lambda t: t.update(bt=t["bt"][:, :3]), r"bt \(2, 3, 6\)"),
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


@pytest.mark.parametrize(
    ("head", "words"),
    (
        (HeadRows(torch.zeros(3, 11), None, torch.tensor([0])), r"rows\[1\]\.weight is \(3, 11\).*\[c, 12\]"),
        (HeadRows(torch.zeros(3, 12), torch.zeros(4), torch.tensor([0])), r"rows\[1\]\.bias is \(4,\)"),
        (
            HeadRows(torch.zeros(3, 12), torch.zeros(3, device="meta"), torch.tensor([0])),
            r"rows\[1\]\.bias is \(3,\) .* on meta; give \[3\] .* on cpu",
        ),
        (
            HeadRows(torch.zeros(3, 12), None, torch.tensor([2, 7])),
            r"rows\[1\]\.index ranges from 2 to 7; h has rows 0 to 6",
        ),
        (HeadRows(torch.zeros(3, 12), None, torch.tensor([-1])), r"rows\[1\]\.index ranges from -1 to -1"),
        (HeadRows(torch.zeros(3, 12), None, torch.tensor([0.5])), r"rows\[1\]\.index is \(1,\) in torch.float32"),
        (HeadRows(torch.zeros(3, 12, device="meta"), None, torch.tensor([0])), r"rows\[1\]\.weight .* on meta"),
    ),
)
def test_heads_that_do_not_fit(head: HeadRows, words: str) -> None:
    fits = HeadRows(torch.zeros(3, 12), None, torch.tensor([0]))
    with pytest.raises(ValueError, match=words):
        head_logits(torch.zeros(7, 12), [fits, head])
    with pytest.raises(ValueError, match=r"h is \(12,\)"):
        head_logits(torch.zeros(12), [fits])
