"""The baseline kernels in the interpreter, against the float64 reference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from atmm import SegmentPlan, reference
from atmm.tuning.search import Case, Shape
from benchmarks.gpu.styles import measure
from benchmarks.kernel_baselines import STYLES, prepare_call
from tests.atmm.cases import make_group, segments
from vlora.bench.gpu.context import Context


@pytest.mark.parametrize("lengths", ({"a": 1, "b": 1, "c": 1}, {"a": 35, "b": 3, "c": 1}), ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_every_style_adds_the_same_deltas(style: str, lengths: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kernel_baselines.MOST_ADAPTERS", 4)  # empty programs are slow, too
    group = make_group({"a": 4, "b": 16, "c": 40}, d_in=80, d_outs=(72, 24, 24), missing=[("a", 1)])
    group.pack("abc")
    lanes = segments(lengths)
    num_tokens = sum(lengths.values())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 80, generator=generator)
    outputs = [torch.randn(num_tokens, site.d_out, generator=generator) for site in group.sites]
    plan = SegmentPlan(num_tokens, lanes)
    right = [reference.add_delta(y, x, site, plan) for site, y in zip(group.sites, outputs, strict=True)]
    prepare_call(style, group, lanes, x, outputs)()
    for y, expected in zip(outputs, right, strict=True):
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_row_of_the_gpu_bench_names_every_style(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kernel_baselines.MOST_ADAPTERS", 4)
    monkeypatch.setattr("benchmarks.gpu.styles.MOST_COPIES", 1)
    context = Context(torch.device("cpu"), Path(), math.inf, lambda found: None)
    row = measure(context, Case(Shape(48, (40, 16)), 8, "float32", 2, 8, False), 1e9, STYLES)
    assert all(row[name] > 0 for name in (*STYLES, "einsum", "us", "ours / floor"))
