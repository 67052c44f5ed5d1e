"""Benchmarks of this project against baselines, run from a checkout: `vlora bench NAME`."""

BENCHES = {
    **{name: f"benchmarks.{name}" for name in ("merge", "atmm", "policy", "memory", "loading", "reuse", "overload")},
    **{name: f"benchmarks.{name}" for name in ("cluster", "heads", "gateway", "vision", "soak", "streams")},
    "split": "benchmarks.split.split",
    **{name: f"benchmarks.{name}" for name in ("packed", "training", "learning", "teachers", "fusion")},
    "bd": "benchmarks.adapters:BD",
    "activated": "benchmarks.adapters:ACTIVATED",
    "retrieve": "benchmarks.retrieve",
    "paper": "benchmarks.paper",
}
"""Each benchmark's module, or MODULE:VALUE, in the order of `vlora bench all`. The last ones train models."""
