"""`vlora bench fusion`: what packing makes of the embedded model, against what else could be done. `vlora bench bd`:
block-diagonal adapters against LoRA of as many numbers."""

from fusion.bench.jobs import Finding, run
from fusion.bench.parity import NUM_SEEDS, Parity, compare
from fusion.bench.plots import draw

__all__ = ["NUM_SEEDS", "Finding", "Parity", "compare", "draw", "run"]
