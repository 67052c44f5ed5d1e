"""`vlora bench split`: what a base executor costs and saves, beside own copies of the model.

Memory is the proportional set size (PSS) of all processes, after one further training step of every client. Speed is
the processor time of a token, of the client and of the executor together, in turns, so that other load on the machine
cancels out. Table 5 and figures 22 and 23 of the paper are in wall time: run them on an otherwise idle machine. Clients
and executors are processes with one thread each. The part "engine" measures a serving engine that serves its weights.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlora.bench.journal import Journal
from vlora.bench.report import Goal, Report, environment
from vlora.bench.split import engine, mixed
from vlora.bench.split.memory import memory, peaks
from vlora.bench.split.rows import FULL, QUICK, Size, write_checkpoint
from vlora.bench.split.speed import NUM_DECODERS, speed
from vlora.bench.split.table5 import table_5
from vlora.errors import BadConfig

GOES_ON = True

PARTS: Mapping[str, Callable[[Path, Size], list[dict[str, Any]]]] = {
    "memory": memory,
    "peaks": lambda checkpoint, _: peaks(checkpoint),
    "speed": speed,
    "table5": table_5,
    "mixed": mixed.measure,
    "engine": engine.measure,
}
"""Parts of the bench, in their order."""


def run(quick: bool, partial: Path | None = None, parts: Sequence[str] = ()) -> Report:
    """Measure memory, speed, batching, and decoding beside training.

    Args:
        quick: Fewer clients and repetitions, a smaller model.
        partial: A file for finished parts until the run is complete; a run of the same commit on the same machine goes
            on with it. Not used if `parts` are chosen.
        parts: Names of `PARTS`; none for all.

    Raises:
        BadConfig: A part is unknown.
    """
    if unknown := sorted(set(parts) - PARTS.keys()):
        raise BadConfig(f"no part {unknown[0]!r} of `vlora bench split`; choose among {', '.join(PARTS)}")
    env = environment()
    identity = {"quick": quick, **{name: env[name] for name in ("machine", "versions", "commit")}}
    journal = Journal(None if parts else partial, identity)
    size = QUICK if quick else FULL
    chosen = [part for part in PARTS if part in (parts or PARTS)]
    rows = [row for part in chosen for row in journal.once(part, functools.partial(one, part, size))]
    journal.close()
    # The report of a whole run may be in the same folder; that of a part must not replace it.
    name = "-".join(("split", *chosen)) if parts else "split"
    return Report(name, rows, goals_of(rows), " ".join(("vlora bench split", *(f"--part {part}" for part in parts))))


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draw what the rows show, beside the paper's numbers."""
    from vlora.bench.split import plots  # matplotlib is an extra

    plots.draw(rows, folder)


def one(part: str, size: Size) -> list[dict[str, Any]]:
    """The rows of a part, on a model of its own."""
    layers = size.mix.layers if part == "mixed" else size.layers
    with tempfile.TemporaryDirectory(prefix="vlora-split-") as folder:
        return PARTS[part](write_checkpoint(Path(folder), layers), size)


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """The goals of the parts that the rows are of."""
    return [
        *_memory_goals(rows),
        *_speed_goals(rows),
        *_table_5_goals(rows),
        *mixed.goals_of(rows),
        *engine.goals_of(rows),
    ]


def _memory_goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    most = max((each["clients"] for each in rows if each["what"] == "memory"), default=0)
    if most < FULL.clients[-1]:  # with fewer, the executor's own process takes more than it saves
        return []
    whole = {each["way"]: each["all MiB"] for each in rows if each["what"] == "memory" and each["clients"] == most}
    share = whole["executor and clients, bfloat16"] / whole["copies that cannot share, bfloat16"]
    return [Goal(f"memory of {most} clients beside copies that cannot share", share, 1.0, True)]


def _speed_goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    ratios = {(each["what"], each["way"]): each["ratio"] for each in rows if each["CPU ms a token"] is not None}
    wanted = (
        ("training, 128 tokens a step", "one client", "training of 128 tokens, CPU time beside an own copy", 1.1),
        ("decoding, one row", "one client", "decoding one row, CPU time beside an own copy", 1.5),
        (
            "decoding, one row each",
            f"{NUM_DECODERS} clients",
            f"{NUM_DECODERS} decoding clients, CPU time a token beside one",
            0.8,
        ),
    )
    return [Goal(name, ratios[what, way], goal, True) for what, way, name, goal in wanted if (what, way) in ratios]


def _table_5_goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    latency = {each["way"]: each["latency ms"] for each in rows if each["what"].startswith("table 5")}
    if not latency:
        return []
    beside = latency["opportunistic"] / latency["lockstep"]
    return [Goal("latency of opportunistic batching beside lockstep", beside, 1, True)]
