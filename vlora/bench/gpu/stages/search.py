"""The search of `vlora tune` for the layers of a 7B model, within the stage's time. Its table, which `vlora tune --out`
writes too, and its journal are files in the folder of the results; a later call continues from the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from atmm.tuning import tables
from atmm.tuning.search import Shape
from vlora import tune
from vlora.bench.gpu.context import Context

QWEN2_VL_7B = (
    Shape(3584, (3584, 512, 512)),
    Shape(3584, (3584,)),
    Shape(3584, (18944, 18944)),
    Shape(18944, (3584,)),
)
"""The layers of a language model that take adapters, one of each kind."""
_SMALL_SHAPES = (Shape(64, (96,)),)
_SMALL_S = 3.0
_RESERVE_S = 45.0  # to write the table and to check its rows against float64
TABLE = "atmm-table.json"


def run(context: Context) -> dict[str, Any]:
    """Measure strategies until all cases are measured or the time is up."""
    seconds = context.left_s - _RESERVE_S if context.on_gpu else _SMALL_S
    shapes: Sequence[Shape] = _SMALL_SHAPES
    if context.on_gpu:
        shapes = QWEN2_VL_7B
    found = tune.tune(
        shapes,
        device=context.device.type,
        dtypes=["bfloat16"],
        minutes=seconds / 60,
        out=context.out / TABLE,
    )
    rows = tables.read_table(context.out / TABLE, context.device.type).rows
    wrong: list[str] = []
    sound = tune.check(context.out / TABLE, context.device.type, wrong.append)
    if not sound:
        raise ValueError(f"strategies of the table differ from float64: {wrong}")
    return {
        "summary": f"{found.num_done} of {found.num_cases} cases, {found.num_rows} rows in {TABLE}",
        **found._asdict(),
        "strategies": Counter(strategy for _, strategy in rows).most_common(12),
    }
