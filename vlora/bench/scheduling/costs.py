"""The costs of a step on this machine, in the format of `vlora simulate --costs`: each timed step next to the fit."""

from __future__ import annotations

import statistics
from typing import Any

from vlora.bench.report import Goal, Report
from vlora.bench.scheduling.fit import RANK, Fit, fit
from vlora.bench.scheduling.models import model_named
from vlora.bench.timing import thread_counts, threads, threads_label
from vlora.config import EngineConfig
from vlora.models.loading import device_of


def run(quick: bool, model: str = "qwen2-0.5b", device: str = "cpu") -> Report:
    """Measure on a CPU with a server's default number of threads (for the reported costs), and with one thread.

    Args:
        quick: Fewer steps of each kind.
        model: One of `models.MODELS`.
        device: The device to measure.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    found: dict[str, Any] = {}
    for number in thread_counts() if device == "cpu" else [1]:
        with threads(number):
            fitted = measure_costs(quick, model, device)
        its_rows = _rows(fitted, number)
        rows += its_rows
        errors = sorted(abs(row["fitted ms"] / row["ms"] - 1) for row in its_rows)
        where = f"of what is fitted over {len(errors)} steps, {threads_label(number)}"
        goals += [
            Goal(f"median relative error {where}", statistics.median(errors), 0.05, True),
            Goal(f"90th percentile of the relative error {where}", errors[int(0.9 * len(errors))], 0.3, True),
        ]
        if not found:
            found = costs_as_dict(fitted, model)
    return Report("costs", rows, goals, found=found)


def _rows(found: Fit, num_threads: int) -> list[dict[str, Any]]:
    return [
        {
            "threads": num_threads,
            "tokens": size.num_tokens,
            "lanes": size.lanes,
            "context": size.num_context,
            "patches": round(size.num_patches),
            "ms": 1e3 * seconds,
            "fitted ms": 1e3 * found.costs.step_s(size),
        }
        for size, seconds in found.samples
    ]


def measure_costs(quick: bool, model: str, device: str) -> Fit:
    """Fit the costs of a model's steps.

    Args:
        quick: Fewer steps of each kind.
        model: One of `models.MODELS`.
        device: The device to measure.

    Raises:
        BadConfig: The model is unknown, or the device is not available.
    """
    return fit(model_named(model), device_of(EngineConfig(model=model, device=device), 0), 1 if quick else 3)


def costs_as_dict(found: Fit, model: str) -> dict[str, Any]:
    """The part of a report that `vlora simulate --costs` reads, and its origin."""
    return {
        "costs": {**found.costs._asdict(), "load_s": found.load_s},
        "fit": {"model": model, "rank": RANK, "median relative error": found.error},
    }
