"""The operator against the tilings of other servers, as `vlora bench atmm`: the quick grid, then the rest of it."""

from __future__ import annotations

from typing import Any

import torch

import atmm
from atmm.tuning.search import Case, Shape
from benchmarks.atmm import measure_cell
from vlora.bench.gpu.context import Context

_SMALL_CASES = (
    Case(Shape(64, (96,)), 8, "float32", 2, 8, True),
    Case(Shape(64, (96,)), 8, "float32", 2, 8, False),
    Case(Shape(64, (96,)), 8, "bfloat16", 4, 16, True),
)
_RESERVE_S = 25.0


def run(context: Context) -> dict[str, Any]:
    """On a CPU the strategies and baselines of a CPU, on small shapes."""
    torch.manual_seed(0)
    return _on_gpu(context) if context.on_gpu else _on_cpu()


def _on_gpu(context: Context) -> dict[str, Any]:
    """As many cells as there is time for."""
    from benchmarks import atmm_gpu  # needs Triton

    speed = atmm_gpu.copy_speed("cuda")
    rows: list[dict[str, Any]] = []
    quick = list(atmm_gpu.cases(quick=True))
    cells = quick + [cell for cell in atmm_gpu.cases(quick=False) if cell not in quick]
    with torch.inference_mode():
        for model, case in context.while_time(cells, _RESERVE_S):
            rows.append({"model": model, **atmm_gpu.measure(case, "cuda", speed)})
            context.keep({"rows": rows, "cells": len(cells)})
        goals = atmm_gpu.goals_of(rows, atmm_gpu.merge_ratio("cuda", speed), atmm_gpu.decode_launches("cuda"))
    worst = min(row["vllm"] for row in rows)
    return {
        "summary": f"{len(rows)} of {len(cells)} cells; vLLM's style takes at least {worst:.2f} x as long",
        "rows": rows,
        "cells": len(cells),
        "goals": goals,
    }


def _on_cpu() -> dict[str, Any]:
    atmm.load_kernels()
    rows = []
    with torch.inference_mode():
        for case in _SMALL_CASES:
            row, _ = measure_cell(case, rounds=2)
            rows.append(row)
    return {"summary": f"{len(rows)} cells of a CPU", "rows": rows}
