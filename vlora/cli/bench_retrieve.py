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
    from apps.retrieval.measuring import goals_of
    from vlora.bench import require_matplotlib, save_report
    from vlora.bench.report import Goal, Report

    if out is not None:
        require_matplotlib()
    with tempfile.TemporaryDirectory() as temporary, waiting("bench retrieve"):
        work = Path(temporary) if out is None else out / "retrieve" / ("quick" if quick else "work")
        work.mkdir(parents=True, exist_ok=True)
        rows, found = _measure(quick, work)
        goals = [] if quick else [Goal(*goal) for goal in goals_of(rows)]
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
    from fusion.bench.result_store import origins
    from fusion.bench.retrieval import ADAPTER, QUESTION, prepare
    from vlora.bench.report import environment

    # In a process of its own, which gives the memory of the training back before the server starts.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        prepared = pool.submit(prepare, quick, work, _say, environment()).result()
    rows: list[dict[str, Any]] = []
    with serving(prepared.base, Path(prepared.adapters), options=("--threads", "1")) as client:
        for collection in prepared.collections:
            rows += measure(
                client,
                Path(collection.folder),
                work,
                collection.queries,
                name=collection.name,
                adapter=ADAPTER,
                num_frames=collection.num_frames,
                base_caption=collection.base_caption,
                caption=collection.caption,
                question=QUESTION,
                say=_say,
                sheet=work / f"{collection.name}.png",
            )
    trained = {"test scores": prepared.scores, "training CPU s": prepared.training_cpu_s}
    return rows, {"adapter": trained, "origins": origins({"adapter": {"origin": prepared.origin}})}


def _say(text: str) -> None:
    click.echo(text, err=True)
