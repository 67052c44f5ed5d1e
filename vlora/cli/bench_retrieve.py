"""`vlora bench retrieve`: trains an adapter, serves it, and measures retrieval with it."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

from vlora.cli.progress import waiting


def bench_retrieve(quick: bool, out: Path | None, only_json: bool) -> bool:
    """Run the bench here, because neither `fusion` nor `apps` imports the other. Returns whether its goals are met."""
    from vlora.bench import require_matplotlib, save_report
    from vlora.bench.report import Report

    if out is not None:
        require_matplotlib()
    with tempfile.TemporaryDirectory() as temporary, waiting("bench retrieve"):
        work = Path(temporary) if out is None else out / "retrieve" / "work"
        work.mkdir(parents=True, exist_ok=True)
        rows, found = _measure(quick, work)
        goals = [] if quick else _goals(rows)
        report = Report("retrieve", rows, goals, found=found)
        if out is not None:
            for sheet in work.glob("*.png"):
                sheet.replace(out / "retrieve" / sheet.name)
    report.print(only_json=only_json)
    if out is not None:
        save_report(report, None, out)
    return all(goal.holds for goal in goals)


def _measure(quick: bool, work: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and further values for the JSON."""
    from apps.retrieval.measuring import measure
    from apps.server_process import serving
    from fusion.bench.retrieval import ADAPTER, QUESTION, prepare

    # In a process of its own, which gives the memory of the training back before the server starts.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        prepared = pool.submit(prepare, quick, work, _say).result()
    rows: list[dict[str, Any]] = []
    with serving(prepared.base, Path(prepared.adapters), options=("--threads", "1")) as client:
        for collection in prepared.collections:
            rows += measure(
                client,
                Path(collection.folder),
                work,
                collection.queries,
                adapter=ADAPTER,
                num_frames=collection.num_frames,
                base_caption=collection.base_caption,
                caption=collection.caption,
                question=QUESTION,
                say=_say,
                sheet=work / f"{collection.name}.png",
            )
    return rows, {"adapter": {"test scores": prepared.scores, "training CPU s": prepared.training_cpu_s}}


def _say(text: str) -> None:
    click.echo(text, err=True)


def _goals(rows: list[dict[str, Any]]) -> list[Any]:
    from apps.retrieval.measuring import ADAPTER, BASE, FEW
    from vlora.bench.report import Goal

    recalls = {(row["videos"].rpartition("-")[0], row["method"]): row for row in rows}
    goals = []
    for videos in dict.fromkeys(name for name, _ in recalls):
        base, adapter, few = (recalls[videos, method] for method in (BASE, ADAPTER, FEW))
        goals += [
            Goal(
                f"{videos}: recall at 5, adapter less base model",
                adapter["recall at 5"] - base["recall at 5"],
                0.1,
                False,
            ),
            Goal(
                f"{videos}: recall at 10, few candidates less all clips",
                few["recall at 10"] - adapter["recall at 10"],
                -0.05,
                False,
            ),
        ]
    return goals
