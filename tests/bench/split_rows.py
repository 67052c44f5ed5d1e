"""Rows of a base executor and its clients with given ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.split import mixed
from benchmarks.split.base_process import POLICIES
from benchmarks.split.mixed import Event, Window
from benchmarks.split.processes import Mix, row
from benchmarks.split.split import WAYS

MIX = Mix(layers=1, inference=8, training=2, prompt=64, answer=4, requests=1, rounds=1)
LATENCIES = {
    mixed.ALL: (1.0, 2.0, 1.5),
    mixed.FEWER: (0.8, 1.6, 1.2),
    mixed.MIXED: (1.1, 2.0, 1.5),
    mixed.WHOLE: (3, 4, 5),
}


def of_all_parts(clients: int, mib: float, latency: float) -> list[dict[str, Any]]:
    """Rows of all parts but mixed."""
    rows = [row("memory", way, clients=clients, **{"all MiB": 100.0, "clients MiB": 100.0}) for way in WAYS]
    for each in rows:
        each["executor MiB"] = 40.0 if each["way"].startswith("executor") else 0
    rows[2]["all MiB"], rows[2]["clients MiB"] = mib, mib - 40.0
    table = {"latency ms": 10.0, "tokens a second": 5.0, "calls a product": 2.0}
    rows += [row("table 5", policy, clients=4, **table) for policy in POLICIES]
    rows[-len(POLICIES)]["latency ms"] = latency
    return rows


def windows(latencies: Mapping[str, Sequence[float]], trained: int) -> dict[str, list[Window]]:
    """A window of each way and round: decoded tokens of a latency, in seconds, and training steps of 128 tokens."""
    found: dict[str, list[Window]] = {}
    for way in mixed.WAYS:
        steps = [Event("train", number, number + 1.0, 128) for number in range(trained)] if "training" in way else []
        prefill = Event("prefill", 0.0, 0.5, 128)
        found[way] = [
            Window(6.0, [prefill, *(Event("decode", 0.5, 0.5 + each, 2) for _ in range(4)), *steps], 0.9)
            for each in latencies[way]
        ]
    return found


def drawable() -> list[dict[str, Any]]:
    rows = of_all_parts(2, 80.0, 9.0) + mixed.rows_of(windows(LATENCIES, trained=3), MIX)
    sizes = {"executor MiB": 3.0, "clients MiB": 20.0, "all MiB": 23.0}
    return [*rows, *(row("peak of training steps", way, clients=1, **sizes) for way in ("own copy", "one client"))]
