"""`vlora bench paper`: the figures of V-LoRA, S-LoRA, Punica, BD-LoRA and Symbiosis, each drawn beside the paper's
numbers.

Reading order: `figure.py` (what a figure is), `measuring.py` (the setting, and stored measurements), `measured`
(measurements that figures share), `figures` (the figures by paper and subject), `runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper import runner
from vlora.bench.harness import Bench, Measured, say
from vlora.bench.report import Report


def run(quick: bool, out: Path, figures: Sequence[str] = ()) -> Report:
    return runner.run(quick, out, figures, say)


BENCH = Bench(name="paper", measure=lambda _: Measured([]), options=frozenset({"figures"}), in_all=False, run=run)
