"""The report of a fusion run as JSON and as a table; `fusion.report.build` renders it as HTML."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from fusion.plan.schema import head_training, trains_by_itself


@dataclasses.dataclass(frozen=True)
class DomainReport:
    """Result of one domain.

    before: metric of the base model's answers in words on the first test samples. after: metric of the fused adapter on
    all test samples. words: share of test samples that the language model answers word for word, if a head answers and
    its answers have words; else None. validation, bound: the metric on validation data and its lower bound, by which
    packing decides. met: whether the bound meets the threshold.
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
    """counts: number of test samples by true label (row) and answered label (column)."""

    domain: str
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class AdapterReport:
    """together: the domains trained at once first, which may include some that did not stay. joined: those that were
    trained into the adapter later, in order."""

    name: str
    domains: tuple[str, ...]
    together: tuple[str, ...]
    joined: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BrokenReport:
    """A score on validation data with a lower bound below its threshold."""

    value: float
    bound: float
    threshold: float


@dataclasses.dataclass(frozen=True)
class RollbackReport:
    """`domains` did not all fit with `into`, or with each other. broken: the domains below their threshold; empty if
    `domains` fitted, but another domain of their adapter did not, so that the merge was undone. stayed: those of
    `domains` that were kept in the adapter."""

    domains: tuple[str, ...]
    into: tuple[str, ...]
    broken: dict[str, BrokenReport]
    stayed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One training in the order of packing: `domains` into the adapter that held `into`, and whether it was kept.

    begin, seconds: within the run's training time. values, bounds: of every domain in the adapter after the training,
    by name; over all steps they form the accuracy matrix. losses: from start to end of the training. removed: the
    domains that were below their threshold and left the adapter, where the others stayed.
    """

    domains: tuple[str, ...]
    into: tuple[str, ...]
    kept: bool
    begin: float
    seconds: float
    values: dict[str, float]
    bounds: dict[str, float]
    losses: tuple[float, ...]
    removed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OracleReport:
    """lower_bound: minimum number of adapters, from the domains that miss alone and the largest set of pairwise
    conflicts. optimum: the fewest adapters that joint training found; None if there were too many domains to try."""

    lower_bound: int
    missed: tuple[str, ...]
    conflicts: tuple[tuple[str, str], ...]
    optimum: tuple[tuple[str, ...], ...] | None


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """confusions: for domains with labels as answers. plan: the plan with all defaults. seconds: duration of this
    run; for a resumed run, since it was resumed."""

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
        """A table for 80 columns, which wraps if names are long. It has a column of lower bounds if a confidence is
        set."""
        numbers = f"{_number(len(self.domains), 'domain')} in {_number(len(self.adapters), 'adapter')}"
        table = Table(title=f"{numbers}, {self.seconds:.0f} s", box=SIMPLE, padding=0, pad_edge=False)
        for column in ("domain", "pixels", "adapter"):
            table.add_column(column, overflow="fold")
        bound = () if self.confidence is None else ("lower\nbound",)
        for column in ("threshold", "validation", *bound, "test\nbefore", "test\nafter"):
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
        """The accuracy in words of domains that a head answers; empty if there are none."""
        found = [f"{domain.name} {domain.words:.3f}" for domain in self.domains if domain.words is not None]
        return f"accuracy in words, for domains with heads: {', '.join(found)}" if found else ""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def model_card(report: FusionReport, adapter: AdapterReport) -> str:
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
    rounded = "" if report.plan["quantize"] == "none" else f" (with its weights in {report.plan['quantize']})"
    return f"""---
base_model: {report.base}
library_name: peft
---
# {adapter.name}

A LoRA adapter for {report.base}{rounded} that holds {len(own)} of the {len(report.domains)} domains of
one fusion run (seed {report.seed}).

| domain | task | pixels | metric | threshold | validation | lower bound ({sure}) | test | test samples |
|---|---|---|---|---|---|---|---|---|
{rows}

Rank {lora["rank"]}{blocks}, alpha {lora["alpha"]}{", rank-stabilised" if lora["rslora"] else ""}, on {layers}{vision}.
{_how_trained(report, adapter)}

`peft.PeftModel.from_pretrained(base, FOLDER)` loads the adapter; `vlora serve --adapter NAME=FOLDER` serves it with its
task heads (`heads.safetensors`), if it has any. Requests name a domain, which stands for the adapter (`domains.json`).
"""


def _how_trained(report: FusionReport, adapter: AdapterReport) -> str:
    training, vision = report.plan["training"], report.plan["lora"]["vision"]
    apart = {domain.name for domain in report.domains if trains_by_itself(domain.task, vision=vision)}
    together, joined = ([n for n in names if n not in apart] for names in (adapter.together, adapter.joined))
    if not together:  # the first domain that joined was the LoRA's first
        together, joined = joined[:1], joined[1:]
    lines = []
    if together:
        steps = f"at most {training['steps']} steps of {training['batch_size']} samples per domain"
        lines.append(f"Trained for {steps}: {', '.join(together)}{' at once' if len(together) > 1 else ''}.")
    if left := [name for name in together if name not in adapter.domains]:
        lines.append(f"Of these, {', '.join(left)} did not stay in the adapter.")
    if joined:
        lines.append(f"Then trained for as many, one after the other: {', '.join(joined)};")
        lines.append(f"{training['rehearsal']:.0%} of each batch came from the domains before it.")
    if heads := [name for name in adapter.domains if name in apart]:
        steps = head_training(training["steps"], training["batch_size"])
        lines.append(f"Heads that were trained by themselves, for at most {steps} each: {', '.join(heads)}.")
    if not together:
        lines.append("The LoRA was not trained: without the vision side, it does not change what such a head reads.")
    return "\n".join(lines)
