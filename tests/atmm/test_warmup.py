"""Kernels that are compiled ahead are those that a step can select: by the rule, or by the device's table."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import atmm.warmup
from atmm import SegmentPlan, compile_ahead, compile_merges
from atmm.triton.tiling import all_usual
from atmm.tuning import tables
from atmm.tuning.buckets import Bucket, Evenness
from tests.atmm.cases import make_group

OWN = "tiled m128 n256 k64 s1 p4"


def named(monkeypatch: pytest.MonkeyPatch, rows: list[tuple[Bucket, str]]) -> dict[int, set[str | None]]:
    """The strategies that are launched ahead with this table, by the inputs of the sites."""
    table = tables.Table(pathlib.Path("table.json"), "GPU", 1, "", rows)
    monkeypatch.setattr(tables, "choose_table", lambda device_type, threads: tables.Choice(table, {}))
    found: dict[int, set[str | None]] = {}

    def launch(y: torch.Tensor, x: torch.Tensor, group: Any, plan: SegmentPlan) -> None:
        found.setdefault(x.shape[1], set()).add(plan.strategy)

    monkeypatch.setattr(atmm.warmup, "add_deltas", launch)
    groups = [make_group({}, d_in=d_in, d_outs=(64, 32)) for d_in in (112, 128, 256)]
    compile_ahead(groups, torch.float32, torch.device("cpu"))
    return found


def test_tilings_of_the_rule_are_compiled_for_all_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {tiling.name for tiling in all_usual(4)}
    assert len(usual) > 3
    assert named(monkeypatch, []) == {112: usual, 128: usual, 256: usual}


def test_tilings_of_a_table_are_compiled_for_the_sites_of_their_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket has rounded sizes: 128 stands for 112 as well."""
    usual = {tiling.name for tiling in all_usual(4)}
    bucket = Bucket(16, 2, 16, 128, 128, 2, Evenness.EVEN, torch.float32, "cuda")
    rows = [
        (bucket, OWN),
        (bucket._replace(tokens=64), "batched"),
        (bucket._replace(num_sites=1), "tiled m64 n64 k64 s1 p2"),
        (bucket._replace(dtype=torch.bfloat16), "tiled m64 n64 k64 s1 p3"),
    ]
    assert named(monkeypatch, rows) == {112: {*usual, OWN}, 128: {*usual, OWN}, 256: usual}


def test_the_interpreter_compiles_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atmm.warmup, "triton_interprets", lambda: True)
    assert named(monkeypatch, []) == {}
    compile_merges([(2**30, 2**30)], torch.float32, torch.device("meta"))
