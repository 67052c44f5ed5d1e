"""What a step costs on this machine, as `vlora simulate --costs` reads it: each timed step beside what the fit says."""

from __future__ import annotations

import statistics
from typing import Any

from vlora.bench.fit import RANK, Fit, fit
from vlora.bench.form import Goal, Report
from vlora.bench.models import model_named
from vlora.config import EngineConfig
from vlora.models.loading import device_of


def run(quick: bool, model: str = "qwen2-0.5b", device: str = "cpu") -> Report:
    """quick: fewer steps of each kind."""
    found = measured(quick, model, device)
    rows: list[dict[str, Any]] = [
        {
            "tokens": size.num_tokens,
            "lanes": size.lanes,
            "context": size.num_context,
            "patches": round(size.num_patches),
            "ms": 1e3 * seconds,
            "fitted ms": 1e3 * found.costs.step_s(size),
        }
        for size, seconds in found.samples
    ]
    errors = sorted(abs(row["fitted ms"] / row["ms"] - 1) for row in rows)
    goals = [
        Goal(f"median relative error of what is fitted over {len(rows)} steps", statistics.median(errors), 0.1, True),
        Goal("90th percentile of it", errors[int(0.9 * len(errors))], 0.3, True),
    ]
    return Report("costs", rows, goals, found=stated(found, model))


def measured(quick: bool, model: str, device: str) -> Fit:
    """Raises BadConfig for a model that is not known, and a device that is not there."""
    return fit(model_named(model), device_of(EngineConfig(model=model, device=device), 0), 1 if quick else 3)


def stated(found: Fit, model: str) -> dict[str, Any]:
    """The part of a report that `vlora simulate --costs` reads, and what it was made from."""
    return {
        "costs": {**found.costs._asdict(), "load_s": found.load_s},
        "fit": {"model": model, "rank": RANK, "median relative error": found.error},
    }
