"""What a fusion run says of itself: JSON for machines, a table for people; `report_page` has it as HTML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclasses.dataclass(frozen=True)
class DomainReport:
    """before: the metric of the base model asked in words, on the first test samples. after: that of the fused adapter,
    on all of them.

    words: share of test samples that the language model answers right, word for word, where a head answers and the
    answers have words; None elsewhere.
    validation, bound: the metric on validation data and its lower bound, which the packing decided on. met: whether
    the bound kept the threshold.
    """

    name: str
    task: str
    real_or_synthetic: str
    metric: str
    threshold: float
    before: float
    validation: float
    bound: float
    after: float
    met: bool
    adapter: str
    num_test: int
    words: float | None

    @property
    def kept_on_test(self) -> bool:
        return self.after >= self.threshold


@dataclasses.dataclass(frozen=True)
class ConfusionReport:
    """counts: test samples by the label shown (row) and the label said (column)."""

    domain: str
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class AdapterReport:
    name: str
    domains: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RollbackReport:
    """domains did not fit beside `into`, or beside one another: accuracies below threshold, had they stayed."""

    domains: tuple[str, ...]
    into: tuple[str, ...]
    broken: dict[str, float]


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One training in the order of packing: `domains` into the adapter that held `into`, and whether they stayed.

    begin, seconds: of the run's training time. values, bounds: of every domain in the adapter afterwards, by name; over
    all steps they are the accuracy matrix. losses: from the training's beginning to its end.
    """

    domains: tuple[str, ...]
    into: tuple[str, ...]
    kept: bool
    begin: float
    seconds: float
    values: dict[str, float]
    bounds: dict[str, float]
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class OracleReport:
    """lower_bound: adapters that are needed at least, for the domains that miss alone and the largest set that
    conflicts two by two. optimum: the fewest that joint training found, None where there were too many to try."""

    lower_bound: int
    missed: tuple[str, ...]
    conflicts: tuple[tuple[str, str], ...]
    optimum: tuple[tuple[str, ...], ...] | None


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """confusions: of domains whose answers are labels. plan: as it was run, with every default. seconds: of this run;
    of one that was resumed, since then."""

    base: str
    seed: int
    seconds: float
    confidence: float | None
    domains: tuple[DomainReport, ...]
    adapters: tuple[AdapterReport, ...]
    rollbacks: tuple[RollbackReport, ...]
    timeline: tuple[StepReport, ...]
    confusions: tuple[ConfusionReport, ...]
    oracle: OracleReport | None
    plan: dict[str, Any]

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        """Nothing is cut off where a terminal is narrow. Lower bounds are a column where a confidence is set."""
        numbers = f"{_number(len(self.domains), 'domain')} in {_number(len(self.adapters), 'adapter')}"
        table = Table(title=f"{numbers}, {self.seconds:.0f} s")
        for column in ("domain", "data", "adapter"):
            table.add_column(column, overflow="fold")
        bound = () if self.confidence is None else ("lower bound",)
        for column in ("threshold", "validation", *bound, "test before", "test after"):
            table.add_column(column, justify="right", overflow="fold")
        for domain in self.domains:
            judged = [f"{domain.validation:.3f}", *([f"{domain.bound:.3f}"] if bound else [])]
            judged[-1] += "" if domain.met else " (missed)"
            table.add_row(
                domain.name,
                domain.real_or_synthetic,
                domain.adapter,
                f"{domain.threshold:.2f}",
                *judged,
                f"{domain.before:.3f}",
                f"{domain.after:.3f}",
            )
        return table

    def in_words(self) -> str:
        """How often words are right where heads answer; empty where no head has words beside it."""
        found = [f"{domain.name} {domain.words:.3f}" for domain in self.domains if domain.words is not None]
        return f"right in words, where heads answer: {', '.join(found)}" if found else ""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def model_card(report: FusionReport, adapter: AdapterReport) -> str:
    """An adapter's README: what it knows, how well, how it was made and how it is used."""
    lora = report.plan["lora"]
    own = [domain for domain in report.domains if domain.adapter == adapter.name]
    rows = "\n".join(
        f"| {d.name} | {d.task} | {d.real_or_synthetic} | {d.metric} | {d.threshold:.3f} | {d.validation:.3f} | "
        f"{d.bound:.3f}{'' if d.met else ' (missed)'} | {d.after:.3f} | {d.num_test} |"
        for d in own
    )
    layers = f"{'all linear layers' if lora['targets'] is None else ', '.join(lora['targets'])} of the language model"
    vision = " and all of the vision side" if lora["vision"] else ""
    blocks = f" in {lora['blocks']} blocks" if lora["blocks"] > 1 else ""
    sure = "no confidence set" if report.confidence is None else f"confidence {report.confidence:g}"
    return f"""---
base_model: {report.base}
library_name: peft
---
# {adapter.name}

A LoRA adapter for {report.base} that holds {len(own)} of the {len(report.domains)} domains of one fusion run (seed
{report.seed}).

| domain | task | pixels | metric | threshold | validation | lower bound ({sure}) | test | test samples |
|---|---|---|---|---|---|---|---|---|
{rows}

Rank {lora["rank"]}{blocks}, alpha {lora["alpha"]}{", rank-stabilised" if lora["rslora"] else ""}, on {layers}{vision}.
{_how_trained(report.plan, adapter)}

`peft.PeftModel.from_pretrained(base, FOLDER)` loads the adapter; `vlora serve --adapter NAME=FOLDER` serves it with its
task heads (`heads.safetensors`), where it has any.
"""


def _how_trained(plan: Mapping[str, Any], adapter: AdapterReport) -> str:
    training = plan["training"]
    steps = f"{training['steps']} steps of {training['batch_size']} samples"
    if len(adapter.domains) == 1:
        return f"Trained for at most {steps}."
    if plan["packing"] == "jointly":
        return f"Trained on all of its domains at once, for at most {steps} each."
    return (
        f"Trained for at most {steps} per domain, one after the other: {', '.join(adapter.domains)};\n"
        f"{training['rehearsal']:.0%} of each batch came from the domains before it."
    )
