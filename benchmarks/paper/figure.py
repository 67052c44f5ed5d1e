"""A figure or table of a paper: the paper's numbers, how the same is measured here, and how both are drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml

from benchmarks.paper.measuring import Measuring, Setting, device_words
from vlora.bench.report import Goal

Found = Mapping[str, Any]
"""The measurements of one figure, as JSON."""

Panel = Callable[[Any], None]
"""Draws on a matplotlib axis."""

PAPERS = {
    "v-lora": "V-LoRA: An Efficient and Flexible System Boosts Vision Applications with LoRA LMM (EuroSys 2025)",
    "s-lora": "S-LoRA: Serving Thousands of Concurrent LoRA Adapters (MLSys 2024)",
    "punica": "Punica: Multi-Tenant LoRA Serving (MLSys 2024)",
    "bd-lora": "BD-LoRA: block-diagonal LoRA for tensor-parallel serving (2025)",
    "symbiosis": "Symbiosis: Multi-Adapter Inference and Fine-Tuning (2025)",
}


class Fact(NamedTuple):
    """A number that a paper gives in its text or in a table.

    Attributes:
        quantity: What the number is of. `Figure.here` has the value measured here under the same name.
        value: The paper's number.
        unit: "%", "x", "ms", "req/s" or the like.
        source: The section, table or caption that has the number.
    """

    quantity: str
    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that this command draws: its row of `figures.yaml`, and the code that measures and draws it.

    Attributes:
        paper: A key of `PAPERS`.
        number: "fig14" or "table3".
        title: The subject.
        states: What the paper shows with it, in a sentence.
        facts: The paper's numbers.
        beside: The label of the panel with the paper's numbers beside ours; None without such a panel.
        caption: What is measured here, and how it differs from the paper.
        model: What is measured, if it is not the setting's model.
        runs_on: "setting": the setting's device. "cpu": one thread of the CPU on every machine. "cores": for scores,
            which depend on no time; all cores of the CPU on a machine with a GPU, one thread otherwise. "processes":
            of one thread of the CPU each, in wall time. "ranks": in wall time, on a CPU unless there are several GPUs.
        minutes: Rough duration of `measure` on one thread of a CPU; a measurement that figures share counts for the
            longest of them. The longest figures begin first, so that processes end together.
        simulated: Whether a figure's values come from the simulator with measured costs.
        measure: Returns the measurements.
        panels: Their panels, in lines from left to right; `beside` is one more.
        here: Values by the quantity of a fact; None where a machine has no counterpart.
        goals: Claims of the paper that must hold here.
        size: Width and height in inches.
        widths: Of the panels of a line, relative to each other; equal by default.
        lines: Of panels.
        revision: Raised when `measure` returns another form, so that values stored before are not read.
    """

    paper: str
    number: str
    title: str
    states: str
    caption: str
    measure: Callable[[Measuring], dict[str, Any]]
    panels: Callable[[Found], Sequence[Panel]]
    facts: Sequence[Fact] = ()
    beside: str | None = None
    here: Callable[[Found], Mapping[str, float | None]] = lambda _: {}
    goals: Callable[[Found], Sequence[Goal]] = lambda _: ()
    model: str | None = None
    runs_on: Literal["setting", "cpu", "cores", "processes", "ranks"] = "setting"
    simulated: bool = False
    minutes: float = 1.0
    size: tuple[float, float] = (10.0, 4.6)
    widths: Sequence[float] | None = None
    lines: int = 1
    revision: int = 1

    @property
    def key(self) -> str:
        return f"{self.paper}:{self.number}"

    @property
    def stored(self) -> str:
        """The name of its measurement."""
        return self.key if self.revision == 1 else f"{self.key}-{self.revision}"

    def device(self, setting: Setting) -> torch.device:
        """The device that `measure` uses."""
        on_cpu = self.runs_on in ("cpu", "cores", "processes")
        on_cpu = on_cpu or (self.runs_on == "ranks" and torch.cuda.device_count() < 2)
        return torch.device("cpu") if on_cpu else setting.device

    def num_threads(self, setting: Setting, available: int) -> int:
        """torch's threads for `measure`: on a CPU one, so that its CPU seconds are of one thread."""
        return 1 if self._has_one_thread(setting) else available

    def runs_alone(self, setting: Setting) -> bool:
        """Whether `measure` runs alone: if the machine has a GPU, or if it measures wall time."""
        return setting.device.type != "cpu" or self.runs_on in ("processes", "ranks")

    def device_words(self, setting: Setting) -> str:
        """The device of `measure` in words, for captions."""
        return device_words(self.device(setting), one_thread=self._has_one_thread(setting))

    def _has_one_thread(self, setting: Setting) -> bool:
        all_cores = self.runs_on == "cores" and setting.device.type != "cpu"
        return self.device(setting).type == "cpu" and not all_cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A figure that this machine cannot show.

    Attributes:
        paper: A key of `PAPERS`.
        number: "fig14" or "table3".
        title: The subject.
        needs: The hardware or data that it needs.
        command: The command to run there; None if this project has no counterpart.
    """

    paper: str
    number: str
    title: str
    needs: str
    command: str | None = None

    @property
    def key(self) -> str:
        return f"{self.paper}:{self.number}"


class Code(NamedTuple):
    """The fields of a `Figure` that are code."""

    measure: Callable[[Measuring], dict[str, Any]]
    panels: Callable[[Found], Sequence[Panel]]
    here: Callable[[Found], Mapping[str, float | None]] = lambda _: {}
    goals: Callable[[Found], Sequence[Goal]] = lambda _: ()


def read_figures(path: Path, code: Mapping[str, Code]) -> tuple[list[Figure], list[Elsewhere]]:
    """The figures of a YAML file with their code by key, and those that this machine cannot show."""
    stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    figures = []
    for key, row in stored["figures"].items():
        facts = [
            Fact(quantity, _value(value, each["unit"]), each["unit"], each["source"])
            for each in row.pop("facts", ())
            for quantity, value in each["values"].items()
        ]
        row["caption"] = row["caption"].format_map(stored["words"])
        figures.append(Figure(**_of_key(key), **row, facts=facts, **code[key]._asdict()))
    return figures, [Elsewhere(**_of_key(key), **row) for key, row in stored["elsewhere"].items()]


def _of_key(key: str) -> dict[str, Any]:
    paper, _, number = key.partition(":")
    return {"paper": paper, "number": number}


def _value(value: float | Sequence[float], unit: str) -> float:
    """A number, or the ratio of two, as a percentage if that is the unit."""
    if isinstance(value, list):
        return (100 if unit == "%" else 1) * value[0] / value[1]
    return float(value)  # type: ignore[arg-type]
