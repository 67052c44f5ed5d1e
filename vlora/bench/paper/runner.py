"""Runs the figures: measures what is not stored, draws, and writes the page and the report."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vlora.bench.paper.drawn import Drawn
from vlora.bench.paper.measured.machine_costs import SIMULATOR_COSTS, write_costs
from vlora.bench.paper.measuring import Measuring, Setting
from vlora.bench.paper.registry import ELSEWHERE, FIGURES, chosen
from vlora.bench.report import Report, environment
from vlora.bench.timing import threads


def run(quick: bool, out: Path, keys: Sequence[str], say: Callable[[str], None]) -> Report:
    """Draw figures into a folder: PNG files, `index.html`, and measurements in `measured`, which a later run in the
    same setting uses again. If costs are measured, they are also written for `vlora simulate --costs`.

    Args:
        quick: Fewer points and repetitions, a smaller model.
        out: The folder.
        keys: Figures to draw, such as "v-lora:fig14"; none for all.
        say: Receives progress, a line at a time.

    Returns:
        The report: the paper's numbers beside ours, and the claims of the papers as goals.

    Raises:
        BadConfig: A figure is unknown.
    """
    from vlora.bench.paper import drawing  # matplotlib is an extra
    from vlora.bench.paper.page import write_page

    figures = chosen(keys)
    setting = Setting.of(quick, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    measuring = Measuring(setting, out / "measured", say)
    started, load = time.perf_counter(), os.getloadavg()[0]
    available = torch.get_num_threads()
    with threads(1 if setting.device.type == "cpu" else available):  # the report states them, as those of all times
        for number, figure in enumerate(figures, start=1):
            say(f"{number} of {len(figures)}: {figure.key}, {figure.title}")
            with threads(figure.num_threads(setting, available)):
                measuring.once(figure.key, functools.partial(figure.measure, measuring))
            gc.collect()
        # The page also has the figures of earlier runs in this setting.
        drawn = [
            Drawn(
                figure,
                measuring.once(figure.key, dict),
                figure.device_words(setting),
                measuring.origins(figure.key),
            )
            for figure in FIGURES
            if measuring.knows(figure.key)
        ]
        for each in drawn:
            drawing.save(each.figure, each.found, setting, out / each.picture)
        if measuring.knows("costs"):
            write_costs(measuring, out / SIMULATOR_COSTS)
        minutes = (time.perf_counter() - started) / 60
        report = _report(drawn, minutes, load, setting)
        write_page(out / "index.html", drawn, ELSEWHERE, report)
    return report


def _report(drawn: Sequence[Drawn], minutes: float, load: float, setting: Setting) -> Report:
    rows = [row for each in drawn for row in each.rows()]
    found = {
        "env": environment(),
        "drawn": [each.figure.key for each in drawn],
        "elsewhere": {each.key: each.needs for each in ELSEWHERE},
        "model": setting.model.name,
        "quick": setting.quick,
        "minutes": round(minutes, 2),
        "load at the start": round(load, 2),
        "of all figures": len(FIGURES),
        "measured": {
            each.figure.key: {
                "device": each.device,
                "origins": {name: origin._asdict() for name, origin in each.origins.items()},
            }
            for each in drawn
        },
    }
    return Report("paper", rows, [goal for each in drawn for goal in each.goals], found=found)
