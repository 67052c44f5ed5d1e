"""`vlora bench atmm`: what a cell measures, what is promised of the cells, and the pictures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atmm.search import Case, Shape
from vlora.bench import atmm as bench

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BASELINES = ("gather and bmm", "padded einsum", "plain loop", "PEFT layer")


def test_a_cell_tells_what_was_chosen_and_how_far_the_others_are_behind() -> None:
    with torch.inference_mode():
        row = bench._measure(Case(Shape(48, (40,)), 8, "float32", 2, 8, False), rounds=2)
    assert (row["layer"], row["tokens"], row["adapters"], row["segments"]) == ("48x40", 8, 2, "uneven")
    assert row["chosen / best"] >= 1 and row["p95 / p50"] >= 1
    assert all(row[name] > 0 for name in BASELINES)


def test_a_call_that_takes_long_is_left_out_of_the_later_rounds() -> None:
    seconds = bench._timed({"long": lambda: 0.2, "short": lambda: 0.001}, rounds=21)
    assert {name: len(taken) for name, taken in seconds.items()} == {"long": 9, "short": 21}


@pytest.mark.parametrize("kept", sorted(RESULTS.glob("atmm_*.json")), ids=lambda path: path.stem)
def test_what_is_stated_follows_from_the_cells_that_are_kept(kept: Path) -> None:
    found = json.loads(kept.read_text())
    assert [goal.as_dict() for goal in bench._goals(found["rows"])] == found["goals"]
    assert found["env"]["machine"] and found["env"]["commit"]


def cells(chosen: tuple[str, ...], others: tuple[str, ...]) -> list[dict[str, Any]]:
    grid = itertools.product(("896x4864", "2048x8192"), ("bfloat16",), (8, 16), (1, 64), (1, 4), ("even", "uneven"))
    names = itertools.cycle(chosen)
    return [
        {
            "layer": layer,
            "dtype": dtype,
            "rank": rank,
            "tokens": tokens,
            "adapters": adapters,
            "segments": segments,
            "us": 10.0 * tokens,
            "chosen": next(names),
            **dict.fromkeys(others, 2.0),
        }
        for layer, dtype, rank, tokens, adapters, segments in grid
    ]


@pytest.mark.parametrize(
    "rows",
    (
        cells(("loop", "batched", "stacked", "gathered", "compiled"), BASELINES),
        cells(("tiled", "tiled m16 n128 k128 s4 p3", "grouped m64 n64 k32 s5"), ("bgmv", "sgmv", "vllm")),
    ),
    ids=("cpu", "gpu"),
)
def test_pictures_of_every_kind_of_cell(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.draw(rows, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["chosen.png", "latency.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000 for file in tmp_path.iterdir())
