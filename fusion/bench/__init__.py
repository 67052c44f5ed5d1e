"""`vlora bench fusion`: packing on the embedded model against other methods. `vlora bench bd`: block-diagonal adapters
against LoRA with the same number of parameters. `vlora bench activated`: activated adapters against ordinary ones."""

from fusion.bench.activated import Activated, compare_activated
from fusion.bench.jobs import BenchResult, run
from fusion.bench.parity import NUM_SEEDS, Parity, compare
from fusion.bench.plots import draw

__all__ = ["NUM_SEEDS", "Activated", "BenchResult", "Parity", "compare", "compare_activated", "draw", "run"]
