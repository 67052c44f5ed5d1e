"""Benchmarks of this project against baselines, run from a checkout: `vlora bench NAME`."""

BENCHES = {
    **{name: f"benchmarks.{name}" for name in ("atmm", "cluster", "gateway")},
    **{name: f"benchmarks.{name}" for name in ("soak", "streams")},
    "split": "benchmarks.split.split",
    **{name: f"benchmarks.{name}" for name in ("packed", "training")},
    "fusion": "benchmarks.fusion.packing",
    "bd": "benchmarks.adapters",
    "retrieve": "benchmarks.retrieve",
    "paper": "benchmarks.paper",
}
"""The module of each benchmark, in the order of `vlora bench all`. The last ones train models."""
