"""`vlora bench fusion`: packing on the embedded model against other methods. `vlora bench bd`: block-diagonal adapters
against LoRA with the same number of parameters."""

from fusion.bench.jobs import BenchResult, run
from fusion.bench.parity import NUM_SEEDS, Parity, compare
from fusion.bench.plots import draw

__all__ = ["NUM_SEEDS", "BenchResult", "Parity", "compare", "draw", "run"]
