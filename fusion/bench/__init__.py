"""`vlora bench fusion`: what packing makes of the embedded model, against what else could be done."""

from fusion.bench.jobs import Finding, run
from fusion.bench.plots import draw

__all__ = ["Finding", "draw", "run"]
