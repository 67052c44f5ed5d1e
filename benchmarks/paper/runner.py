"""Runs the figures: measures what is not stored, draws, and writes the page and the report."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from benchmarks.paper import drawing
from benchmarks.paper.figure import PAPERS, Elsewhere, Figure, Found, read_figures
from benchmarks.paper.figures import (
    punica_operator,
    slora_serving,
    symbiosis,
    tensor_parallel,
    throughput,
    vlora_accuracy,
    vlora_operator,
    vlora_serving,
    vlora_steps,
)
from benchmarks.paper.measured.machine_costs import write_costs
from benchmarks.paper.measuring import Measuring, Origin, Setting
from vlora.bench.report import Goal, Report, environment
from vlora.bench.timing import threads
from vlora.engine.host_resources import default_threads
from vlora.errors import BadConfig


class Drawn(NamedTuple):
    """One figure with its measurements.

    Attributes:
        figure: The figure.
        found: Its measurements.
        device: The device that it uses, in words.
        origins: When its measurements were made, and those from which they were derived, by name.
    """

    figure: Figure
    found: Found
    device: str
    origins: Mapping[str, Origin]

    @property
    def own(self) -> Origin:
        return self.origins[self.figure.stored]

    @property
    def picture(self) -> str:
        return f"{self.figure.paper}-{self.figure.number}.png"

    @property
    def goals(self) -> Sequence[Goal]:
        return self.figure.goals(self.found)

    def other_commits(self, commit: str | None) -> dict[str, Origin]:
        """The origins at other commits than this one."""
        return {name: origin for name, origin in self.origins.items() if origin.commit != commit}

    def rows(self) -> list[dict[str, Any]]:
        """Each of the paper's numbers beside the one measured here."""
        here = self.figure.here(self.found)
        return [
            {
                "figure": self.figure.key,
                "quantity": fact.quantity,
                "unit": fact.unit,
                "paper": fact.value,
                "here": here.get(fact.quantity),
                "simulated": self.figure.simulated,
                "source": fact.source,
            }
            for fact in self.figure.facts
        ]


def write_page(path: Path, drawn: Sequence[Drawn], elsewhere: Sequence[Elsewhere], report: Report) -> None:
    """Write the page.

    Args:
        path: The file; pictures are in the same folder.
        drawn: The figures of this run.
        elsewhere: Those that need another machine.
        report: For the machine and the time.
    """
    templates = Environment(
        loader=PackageLoader("benchmarks.paper", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters["number"] = lambda value: "n/a" if value is None else drawing.short(value)
    templates.filters["commit"] = lambda commit: (commit or "unknown")[:12]
    stated = report.as_dict()
    path.write_text(
        templates.get_template("page.html.j2").render(
            papers=PAPERS, drawn=drawn, elsewhere=elsewhere, env=stated["env"], found=report.found
        )
    )


_MODULES = (
    punica_operator,
    slora_serving,
    symbiosis,
    tensor_parallel,
    throughput,
    vlora_accuracy,
    vlora_operator,
    vlora_serving,
    vlora_steps,
)
FIGURES, ELSEWHERE = read_figures(
    Path(__file__).with_name("figures.yaml"),
    {key: code for module in _MODULES for key, code in module.CODE.items()},
)


def chosen(keys: Sequence[str]) -> list[Figure]:
    """The figures with these keys in the order of the page.

    Args:
        keys: Keys of figures, such as "v-lora:fig14"; none for all.

    Raises:
        BadConfig: A key is unknown, or the figure needs another machine.
    """
    known = {figure.key: figure for figure in FIGURES}
    others = {each.key: each for each in ELSEWHERE}
    for key in keys:
        if key in others:
            each = others[key]
            raise BadConfig(f"{key} ({each.title}) is not drawn by this command; it needs {each.needs}")
        if key not in known:
            raise BadConfig(f"no figure {key!r}; choose among {', '.join(known)}")
    return [figure for figure in FIGURES if not keys or figure.key in keys]


_PROCESSES = 2  # more of them compete for caches and memory, of which each uses several GiB


def run(quick: bool, out: Path, keys: Sequence[str], say: Callable[[str], None]) -> Report:
    """Draw figures into a folder: PNG files, `index.html`, and measurements in `measurements_folder`, which a later run
    in the same setting uses again. If costs are measured, they are also written there for `vlora simulate --costs`.

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
    figures = chosen(keys)
    measuring = _measuring(quick, out, say)
    setting = measuring.setting
    started, load = time.perf_counter(), os.getloadavg()[0]
    num_before = sum(measuring.knows(each.stored) for each in figures)
    available = torch.get_num_threads()
    with threads(1 if setting.device.type == "cpu" else available):  # the report states them, as those of all times
        beside = [each for each in figures if not each.runs_alone(setting)]
        _measure_side_by_side([each for each in beside if not measuring.knows(each.stored)], quick, out, say)
        for figure in figures:
            if figure.runs_alone(setting):
                say(f"{figure.key}, {figure.title}")
                with threads(figure.num_threads(setting, available)):
                    measuring.once(figure.stored, functools.partial(figure.measure, measuring))
                gc.collect()
        # The page also has the figures of earlier runs in this setting.
        drawn = [
            Drawn(
                figure,
                measuring.once(figure.stored, dict),
                figure.device_words(setting),
                measuring.origins(figure.stored),
            )
            for figure in FIGURES
            if measuring.knows(figure.stored)
        ]
        for each in drawn:
            drawing.save(each.figure, each.found, setting, out / each.picture)
        if measuring.knows("costs"):
            write_costs(measuring)
        minutes = (time.perf_counter() - started) / 60
        report = _report(drawn, minutes, num_before, load, setting)
        write_page(out / "index.html", drawn, ELSEWHERE, report)
    return report


def _measure_side_by_side(figures: Sequence[Figure], quick: bool, out: Path, say: Callable[[str], None]) -> None:
    """Measure figures of one thread each, in CPU seconds, in processes of their own. If one fails, the others end."""
    processes = min(len(figures), default_threads(), _PROCESSES)
    if processes < 2:
        for figure in figures:
            say(f"{figure.key}, {figure.title}")
            _measure(figure.key, quick, out)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        try:
            longest_first = sorted(figures, key=lambda figure: -figure.minutes)
            running = {pool.submit(_measure, figure.key, quick, out): figure for figure in longest_first}
            for number, done in enumerate(as_completed(running), start=1):
                done.result()
                say(f"{number} of {len(figures)}: {running[done].key}, {running[done].title}")
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # leaving the pool waits for its end
            raise


def _end_with_parent() -> None:
    """Begin a process of measurements: it ignores Ctrl-C, which its parent handles, and ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _measure(key: str, quick: bool, out: Path) -> None:
    """Measure a figure with one thread, in any process."""
    (figure,) = chosen([key])
    with threads(1):
        measuring = _measuring(quick, out, functools.partial(print, file=sys.stderr, flush=True))
        measuring.once(figure.stored, functools.partial(figure.measure, measuring))
    gc.collect()


def measurements_folder(quick: bool, out: Path) -> Path:
    """The folder of measurements. Quick ones have their own, so that they do not replace those of a full run."""
    return out / "measured" / "quick" if quick else out / "measured"


def _measuring(quick: bool, out: Path, say: Callable[[str], None]) -> Measuring:
    setting = Setting.of(quick, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Measuring(setting, measurements_folder(quick, out), say)


def _report(drawn: Sequence[Drawn], minutes: float, num_before: int, load: float, setting: Setting) -> Report:
    rows = [row for each in drawn for row in each.rows()]
    found = {
        "env": environment(),
        "drawn": [each.figure.key for each in drawn],
        "elsewhere": {each.key: each.needs for each in ELSEWHERE},
        "model": setting.model.name,
        "quick": setting.quick,
        "minutes": round(minutes, 2),
        "measured before": num_before,
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
