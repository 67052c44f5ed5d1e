"""Processor time of a token through an executor, beside that of an own copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlora.bench.split.processes import Process, run_together, running
from vlora.bench.split.rows import TRAIN, Size, row

NUM_DECODERS = 4


def speed(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """Processor time of a token: an own copy, one client of an executor, and several that decode at once."""
    address = f"unix:{checkpoint.parent}/speed.sock"
    with (
        running(Process("base_process", str(checkpoint), address)) as (base,),
        running(*(Process("worker", str(checkpoint), "--base", address) for _ in range(NUM_DECODERS))) as clients,
        running(Process("worker", str(checkpoint))) as own,
    ):

        def cpu_ms(workers: Sequence[Process], command: dict[str, Any]) -> float:
            before = base.cpu_s()
            answers = run_together(workers, [command] * len(workers))
            total = base.cpu_s() - before + sum(answer["cpu_s"] for answer in answers)
            return 1e3 * total / sum(answer["tokens"] for answer in answers)

        prefill, decode = {"do": "prefill", "rows": 1, "length": 32}, {"do": "decode", "tokens": size.tokens}
        for workers in (own, clients):
            run_together(workers, [prefill] * len(workers))
        return [
            *_compared(
                "training, 128 tokens a step",
                {"own copy": lambda: cpu_ms(own, TRAIN), "one client": lambda: cpu_ms(clients[:1], TRAIN)},
                size.rounds,
            ),
            *_compared(
                "decoding, one row",
                {"own copy": lambda: cpu_ms(own, decode), "one client": lambda: cpu_ms(clients[:1], decode)},
                size.rounds,
            ),
            *_compared(
                "decoding, one row each",
                {
                    "one client": lambda: cpu_ms(clients[:1], decode),
                    f"{NUM_DECODERS} clients": lambda: cpu_ms(clients, decode),
                },
                size.rounds,
            ),
        ]


def _compared(what: str, ways: dict[str, Callable[[], float]], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each way, and the median of the ratios to the first, by turns; one round does not count."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, call in ways.items():
            measured = call()
            if turn:
                found[way].append(measured)
    first = next(iter(found.values()))
    return [
        row(
            what,
            way,
            clients=NUM_DECODERS if way.startswith(str(NUM_DECODERS)) else 1,
            ratio=statistics.median(a / b for a, b in zip(values, first, strict=True)),
            **{"CPU ms a token": statistics.median(values)},
        )
        for way, values in found.items()
    ]
