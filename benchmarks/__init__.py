"""Benchmarks of this project against baselines, run from a checkout: `vlora bench NAME`."""

BENCHES = {
    **{name: f"benchmarks.{name}" for name in ("atmm", "cluster", "gateway", "streams", "training")},
    "fusion": "benchmarks.fusion.packing",
    **{name: f"benchmarks.{name}" for name in ("retrieve", "paper")},
}
"""The module of each benchmark, in the order of `vlora bench all`. The last ones train models."""
