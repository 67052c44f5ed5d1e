"""Decoding clients of different batch sizes under three ways to batch: the paper's table 5 in shape."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from vlora.bench.split.base_process import POLICIES
from vlora.bench.split.processes import Process, run_together, running
from vlora.bench.split.rows import Size, row


def table_5(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """The paper's table 5 in shape: decoding clients of different batch sizes under three ways to batch."""
    addresses = [f"unix:{checkpoint.parent}/policy{place}.sock" for place in range(len(POLICIES))]
    bases = [
        Process("base_process", str(checkpoint), address, "--policy", policy)
        for policy, address in zip(POLICIES, addresses, strict=True)
    ]
    flags = [flag for address in addresses for flag in ("--base", address)]
    walls: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    speeds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for base in bases:
        base.ready()
    try:
        with running(*(Process("worker", str(checkpoint), *flags) for _ in size.rows)) as clients:
            for turn in range(size.rounds + 1):
                for place, policy in enumerate(POLICIES):
                    if not turn:
                        run_together(
                            clients,
                            [{"do": "prefill", "client": place, "rows": rows, "length": 8} for rows in size.rows],
                        )
                        continue
                    command = {"do": "decode", "client": place, "tokens": size.tokens}
                    answers = run_together(clients, [command] * len(clients))
                    walls[policy].append(statistics.mean(a["wall_s"] for a in answers) / size.tokens)
                    speeds[policy].append(sum(a["tokens"] for a in answers) / max(a["wall_s"] for a in answers))
    finally:
        stopped = [base.stop() for base in bases]
    return [
        row(
            "table 5: clients of different batch sizes",
            policy,
            clients=len(size.rows),
            **{
                "tokens a second": statistics.median(speeds[policy]),
                "latency ms": 1e3 * statistics.median(walls[policy]),
                "calls a product": _calls_a_product(last),
            },
        )
        for policy, last in zip(POLICIES, stopped, strict=True)
    ]


def _calls_a_product(printed: str) -> float:
    counts = json.loads(printed.splitlines()[-1])
    return float(counts["calls"] / counts["batches"])
