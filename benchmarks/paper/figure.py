"""A figure or table of a paper: the setting of its measurement, the paper's numbers, the measured rows beside them, and
how both are drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml

from atmm.processor import prefers_float32
from benchmarks.plots import COLORS, Picture, select
from vlora.bench.dummy import MODELS, BenchModel, served_config
from vlora.bench.harness import Store
from vlora.bench.report import Goal, Row, environment

RANK = 64
"""Of adapters, as in V-LoRA section 6.1."""

QUICK_MODEL = BenchModel("qwen2-0.5b, 6 layers", lambda: served_config(6), 512 * 2**20)
"""Six layers of the 0.5 B model, with a vocabulary so small that the layers take most of the time."""


@dataclasses.dataclass(frozen=True)
class Setting:
    quick: bool  # fewer points and repetitions, on a CPU also a model of fewer layers
    device: torch.device
    model: BenchModel  # of all measurements of steps and of all simulations

    @classmethod
    def here(cls, quick: bool) -> Setting:
        """This machine's: its GPU with a 7 B model, or one thread of its CPU with the 0.5 B model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            return cls(quick, device, MODELS["qwen2-vl-7b"])
        return cls(quick, device, QUICK_MODEL if quick else MODELS["qwen2-0.5b"])

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 9

    @property
    def baseline_dtype(self) -> str:
        """Of other operators and of PEFT: the faster of bfloat16 and float32, which their users would choose."""
        return "float32" if prefers_float32(torch.bfloat16, self.device) else "bfloat16"

    @property
    def model_words(self) -> str:
        """The model in words, for captions."""
        return f"{self.model.name}, random weights, bfloat16, adapters of rank {RANK}"


def device_words(device: torch.device, *, one_thread: bool) -> str:
    """A device of this machine in words, for captions; one_thread: of a CPU, whether to say so."""
    env = environment()
    if device.type == "cuda":
        return str(env["gpu"])
    name = str(env["machine"]).partition(",")[0].removeprefix("x86_64 ")
    return f"{name}, one thread" if one_thread else name


class Measuring:
    """The setting of a figure's measurement, and the stored measurements that figures share.

    Attributes:
        used: Names of the stored measurements that were read or made.
    """

    def __init__(self, setting: Setting, store: Store) -> None:
        self.setting = setting
        self.store = store
        self.used: list[str] = []

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The measurement of this name, made first if no process has stored it."""
        self.used.append(name)
        return self.store.value(name, make)


Found = Mapping[str, Any]
"""The measurements of one figure, as JSON: `rows`, and `goals` where a benchmark has its own."""

PAPERS = {
    "v-lora": "V-LoRA: An Efficient and Flexible System Boosts Vision Applications with LoRA LMM (EuroSys 2025)",
    "s-lora": "S-LoRA: Serving Thousands of Concurrent LoRA Adapters (MLSys 2024)",
    "punica": "Punica: Multi-Tenant LoRA Serving (MLSys 2024)",
    "bd-lora": "BD-LoRA: block-diagonal LoRA for tensor-parallel serving (2025)",
    "symbiosis": "Symbiosis: Multi-Adapter Inference and Fine-Tuning (2025)",
}
THE_PAPER, HERE = "the paper", "here"
FORM = 2
"""Of stored measurements; raised when rows get other columns, so that those stored before are not read."""


_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "geometric mean": statistics.geometric_mean,
    "min": min,
    "max": max,
    "sum": sum,
    "spread": lambda values: max(values) / min(values),
}
_FORMS: dict[str, Callable[[float, float], float]] = {
    "ratio": lambda own, other: own / other,
    "percent": lambda own, other: 100 * own / other,
    "less": lambda own, other: 100 * (1 - own / other),
    "more": lambda own, other: 100 * (own / other - 1),
    "difference": lambda own, other: own - other,
}


class Comparison(NamedTuple):
    """A number computed from measured rows.

    Attributes:
        column: Of the values.
        of: Their rows.
        to: What differs in the rows that they are compared with, pair by pair.
        against: The column of the other values, if it is another one.
        form: Of each pair: "ratio", "percent" (of the other value), "less" and "more" (by how many per cent) or
            "difference".
        reduce: Makes one number of all pairs, or of all values without a comparison; "sum" compares the two sums.
        by: A column for whose values the number is computed one by one.
        take: "min" or "max" of these.
        least: A smaller sum has no ratio.
    """

    column: str
    of: Mapping[str, Any] = {}
    to: Mapping[str, Any] = {}
    against: str | None = None
    form: str = "ratio"
    reduce: str = "mean"
    by: str | None = None
    take: str = "min"
    least: float = -math.inf

    def number(self, rows: Sequence[Row]) -> float | None:
        """None if there is no such value."""
        own, reduce = select(rows, self.of), _REDUCE[self.reduce]
        if self.by is not None and own:
            parts = [{**self.of, self.by: value} for value in dict.fromkeys(row[self.by] for row in own)]
            numbers = [self._replace(of=part, by=None).number(rows) for part in parts]
            return _REDUCE[self.take]([number for number in numbers if number is not None])
        values = [row[self.column] for row in own]
        others = [row[self.against or self.column] for row in select(rows, {**self.of, **self.to})]
        if not values or not others:
            return None
        if not self.to and self.against is None:
            return reduce(values)
        if self.reduce == "sum":
            values, others = [sum(values)], [sum(others)]
            if others[0] < self.least:
                return None
        return reduce([_FORMS[self.form](*pair) for pair in zip(values, others, strict=True)])


class Fact(NamedTuple):
    """A number that a paper gives in its text, a table or a caption, and the same here."""

    quantity: str
    value: float
    unit: str
    source: str
    here: Comparison


class Claim(NamedTuple):
    """A claim of the paper that must hold here: its name, what is compared with a bound, and in which direction."""

    name: str
    number: Comparison
    bound: float
    at_most: bool


class Figure(NamedTuple):
    """A figure that this command draws: a row of `figures.yaml`.

    Attributes:
        number: "fig14" or "table3".
        states: What the paper shows with it, in a sentence.
        beside: The label of the panel with the paper's numbers beside ours; None without such a panel.
        caption: What is measured here, and how it differs from the paper.
        model: What is measured, if it is not the setting's model.
        runs_on: "setting": the setting's device. "cpu": one thread of the CPU on every machine. "cores": for scores,
            which depend on no time; all cores of the CPU on a machine with a GPU, one thread otherwise. "processes":
            of one thread of the CPU each, in wall time. "ranks": in wall time, on a CPU unless there are several GPUs.
            "server": the setting's device, in wall time.
        minutes: Rough duration of its measurement on one thread of a CPU; a measurement that figures share counts for
            the longest of them. The longest figures begin first, so that processes end together.
        simulated: Whether a figure's values come from the simulator with measured costs.
        measure: Arguments of `find`.
        table: The paper's rows.
        panels: Arguments of `plots.Panel`, from left to right, line by line. `beside` is one more panel.
        goals: Claims of the paper that must hold here; those that come with the measurement by default.
        size: Width and height in inches.
        widths: Of the panels of a line, relative to each other; equal by default.
        lines: Of panels.
    """

    paper: str
    number: str
    title: str
    states: str
    caption: str
    measure: Mapping[str, Any]
    panels: Sequence[Mapping[str, Any]] = ()
    facts: Sequence[Fact] = ()
    table: Sequence[Row] = ()
    beside: str | None = None
    goals: Sequence[Claim] = ()
    model: str | None = None
    runs_on: Literal["setting", "cpu", "cores", "processes", "ranks", "server"] = "setting"
    simulated: bool = False
    minutes: float = 1.0
    size: tuple[float, float] = (10.0, 4.6)
    widths: Sequence[float] | None = None
    lines: int = 1

    @property
    def key(self) -> str:
        return f"{self.paper}:{self.number}"

    @property
    def stored(self) -> str:
        """The name of its measurement."""
        return f"{self.key}-{FORM}"

    def rows(self, found: Found) -> list[Row]:
        """The paper's and those measured here, by `who`."""
        return [{"who": THE_PAPER, **row} for row in self.table] + [{"who": HERE, **row} for row in found["rows"]]

    def here(self, found: Found) -> dict[str, float | None]:
        """The values measured here, by quantity of the facts."""
        return {fact.quantity: fact.here.number(found["rows"]) for fact in self.facts}

    def goals_of(self, found: Found) -> list[Goal]:
        """Those that apply to what was measured."""
        if not self.goals:
            return [Goal(*goal) for goal in found.get("goals", ())]
        numbers = [(claim, claim.number.number(found["rows"])) for claim in self.goals]
        return [Goal(claim.name, number, claim.bound, claim.at_most) for claim, number in numbers if number is not None]

    def picture(self, found: Found, setting: Setting) -> Picture:
        """With the paper's numbers beside ours, and the device and the model in the caption."""
        paper, kind = PAPERS[self.paper].partition(":")[0], "Figure" if self.number.startswith("fig") else "Table"
        title = f"{paper}, {kind} {self.number.removeprefix('fig').removeprefix('table')}: {self.title}"
        panels = [*self.panels, *([] if self.beside is None else [self._beside(found, self.beside)])]
        return Picture(self.rows(found), panels, title, self.size, self.widths, self.lines, self.words(setting))

    def words(self, setting: Setting) -> str:
        """The caption with the device and the model."""
        kind = "Simulated with costs measured on" if self.simulated else "Measured on"
        return f"{self.caption} {kind}: {self.device_words(setting)}; {self.model or setting.model_words}."

    def _beside(self, found: Found, label: str) -> dict[str, Any]:
        """The panel of the paper's numbers beside those measured here, facts with one unit."""
        here, number = self.here(found), len(self.facts)
        return {
            "kind": "bars",
            "rows": [{"fact": each.quantity, THE_PAPER: each.value, HERE: here[each.quantity]} for each in self.facts],
            "x": "{fact}",
            "series": [{"name": who, "y": who} for who in (THE_PAPER, HERE)],
            "settings": {"ylabel": label, "title": "beside the paper's numbers"},
            "options": {"wrap": max(9, min(17, 66 // number)), "colors": ("#d98c3f", COLORS[0]), "missing": "n/a"},
        }

    def device(self, setting: Setting) -> torch.device:
        on_cpu = self.runs_on in ("cpu", "cores", "processes")
        on_cpu = on_cpu or (self.runs_on == "ranks" and torch.cuda.device_count() < 2)
        return torch.device("cpu") if on_cpu else setting.device

    def num_threads(self, setting: Setting, available: int) -> int:
        """torch's threads: on a CPU one, so that its CPU seconds are of one thread."""
        return 1 if self._has_one_thread(setting) else available

    def runs_alone(self, setting: Setting) -> bool:
        """Whether it is measured alone: if the machine has a GPU, or in wall time."""
        return setting.device.type != "cpu" or self.runs_on in ("processes", "ranks", "server")

    def device_words(self, setting: Setting) -> str:
        return device_words(self.device(setting), one_thread=self._has_one_thread(setting))

    def _has_one_thread(self, setting: Setting) -> bool:
        all_cores = self.runs_on == "cores" and setting.device.type != "cpu"
        return self.device(setting).type == "cpu" and not all_cores


class Elsewhere(NamedTuple):
    """A figure that this machine cannot show: the hardware or data that it needs, and the command to run there; None if
    this project has no counterpart.
    """

    paper: str
    number: str
    title: str
    needs: str
    command: str | None = None

    @property
    def key(self) -> str:
        return f"{self.paper}:{self.number}"


def read_figures(path: Path) -> tuple[list[Figure], list[Elsewhere]]:
    """The figures of a YAML file, and those that this machine cannot show."""
    stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    figures = []
    for key, row in stored["figures"].items():
        row["caption"] = row["caption"].format_map(stored["words"])
        table = row.pop("table", {"columns": (), "rows": ()})
        row["table"] = [dict(zip(table["columns"], values, strict=True)) for values in table["rows"]]
        row["facts"] = [fact for group in row.get("facts", ()) for fact in _facts(**group)]
        row["goals"] = [claim for group in row.get("goals", ()) for claim in _claims(**group)]
        figures.append(Figure(*key.split(":"), **row))
    return figures, [Elsewhere(*key.split(":"), **row) for key, row in stored["elsewhere"].items()]


def _facts(source: str, unit: str, here: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]]) -> Iterator[Fact]:
    """A fact for each of the paper's values, or for the ratio of two; its other arguments are of its comparison."""
    for quantity, arguments in values.items():
        own = {**here, **arguments}
        value = own.pop("paper")
        if isinstance(value, list):
            value = (100 if unit == "%" else 1) * value[0] / value[1]
        yield Fact(quantity, float(value), unit, source, Comparison(**own))


def _claims(name: str, each: Mapping[str, Sequence[str]] = {}, **arguments: Any) -> Iterator[Claim]:
    """A claim for all combinations of the values `each`, which its texts have as {column}."""
    (side,) = {"at most", "at least"} & arguments.keys()
    bound = arguments.pop(side)
    for values in itertools.product(*each.values()):
        words = dict(zip(each, values, strict=True))
        yield Claim(name.format_map(words), Comparison(**_filled(arguments, words)), bound, side == "at most")


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, words) for key, each in value.items()}
    return value.format_map(words) if isinstance(value, str) else value
