"""Pictures of benches, drawn from rows of every kind that a report may have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import atmm, cluster, streams
from vlora.routing import RULES

pytestmark = pytest.mark.slow
pytest.importorskip("matplotlib")


def cells(chosen: Sequence[str], others: Sequence[str]) -> list[dict[str, Any]]:
    names = itertools.cycle(chosen)
    fields = ("layer", "dtype", "rank", "tokens", "adapters", "segments")
    grid = itertools.product(("896x4864", "2048x8192"), ("bfloat16",), (8, 16), (1, 64), (1, 4), ("even", "uneven"))
    return [
        dict(zip(fields, each, strict=True))
        | {"us": 10.0 * each[3], "chosen": next(names), **dict.fromkeys(others, 2.0)}
        for each in grid
    ]


def cluster_rows() -> list[dict[str, Any]]:
    rows = [
        cluster.row(part=cluster.HOUR, case=cluster.HOUR_MAIN, rule=rule, samples=[[0, 3], [2, 4], [1, 0]] * 4)
        for rule in RULES
    ]
    late = {"loads": 30, "ttft p99 s": 0.5}
    rows += [cluster.row(part=cluster.DRIFT, case=cluster.DRIFT_MAIN, rule=rule, **late) for rule in RULES]
    spent = {"p50 us": 9.0, "p99 us": 20.0}
    return rows + [cluster.row(part=cluster.DECISIONS, rule="placed", N=number, **spent) for number in (2, 16)]


CAMERAS = [
    {"threads": threads, "tasks": tasks, "adapters": kind, "fps": fps, "cameras": round(40 / fps / tasks)}
    for threads, tasks, kind, fps in itertools.product((2, 1), (1, 2), ("ordinary", "activated"), (1.0, 5.0))
]
CPU = cells(
    ("loop", "batched", "stacked", "gathered", "compiled"),
    ("gather and bmm", "padded einsum", "plain loop", "PEFT layer"),
)
GPU = cells(("tiled", "tiled m16 n128 k128 s4 p3", "grouped m64 n64 k32 s5"), ("bgmv", "sgmv", "vllm"))


@pytest.mark.parametrize(
    ("bench", "rows", "names"),
    (
        pytest.param(atmm, CPU, {"chosen", "latency"}, id="atmm"),
        pytest.param(atmm, GPU, {"chosen", "latency"}, id="atmm on a GPU", marks=pytest.mark.exhaustive),
        pytest.param(cluster, cluster_rows(), {"hour", "placement", "decisions"}, id="cluster"),
        pytest.param(streams, CAMERAS, {"cameras"}, id="streams"),
    ),
)
def test_pictures_have_every_kind_of_row(
    bench: Any, rows: list[dict[str, Any]], names: set[str], tmp_path: Path
) -> None:
    pictures = bench.BENCH.pictures(rows)
    for file, picture in pictures.items():
        picture.save(tmp_path / f"{file}.png")
    assert {path.stem for path in tmp_path.iterdir()} == names == set(pictures)
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
