"""The end of a run: the adapters are tested, and the results and their report are written."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from fusion.data.samples import Splits
from fusion.data.targets import answer_in_words
from fusion.folder import former_adapters, replace_results
from fusion.packing.algorithm import Packing, names_of
from fusion.plan.schema import Plan
from fusion.report.examples import Example, confusion_of, examples_of
from fusion.report.report import (
    AdapterReport,
    BrokenReport,
    DomainReport,
    FusionReport,
    OracleReport,
    RollbackReport,
    StepReport,
    model_card,
)
from fusion.synthetic.sources import STREAMS
from fusion.training.objectives import ANSWERS, HeadObjective
from fusion.training.scoring import Parameters
from fusion.training.session import RunData, Session, Untrained
from vlora.adapter_files import DOMAINS_FILE
from vlora.types.domain import DomainSummary

_MAX_SAMPLES = 100  # per domain


class Tested(NamedTuple):
    """A domain's results on test data.

    answers: of the adapter, in the form that the domain's metric compares. parameters: of its calibrated head. words:
    share of samples that the language model answers word for word, if a head answers and its answers have words; else
    None. by_head, by_words: shares of validation samples that each way answers right, for domains with both.
    """

    answers: list[Any]
    parameters: Parameters | None = None
    words: float | None = None
    by_head: float | None = None
    by_words: float | None = None


def report_run(
    session: Session,
    untrained: Mapping[str, Untrained],
    thresholds: Mapping[str, float],
    packing: Packing,
    optimum: OracleReport | None,
    out: Path,
    started: float,
) -> FusionReport:
    """Test the adapters and write all results to OUT, where they replace those of an earlier run."""
    data = session.data
    tested = answer_test_data(packing, session)
    names = names_of(packing.adapters, data.plan.name, former_adapters(out), tuple(data.domains))
    plan, domains = data.plan, data.domains
    targets = {name: [sample.target for sample in own.splits.test] for name, own in domains.items()}
    report = FusionReport(
        base=plan.base,
        seed=plan.seed,
        seconds=time.perf_counter() - started,
        confidence=plan.confidence,
        domains=tuple(
            DomainReport(
                name=name,
                task=domains[name].splits.task,
                real_or_synthetic="real" if domains[name].splits.real else "synthetic",
                metric=domains[name].task.metric_name,
                threshold=thresholds[name],
                before=untrained[name].score,
                validation=trained.scores[name].value,
                bound=trained.scores[name].lower,
                after=domains[name].task.metric(tested[name].answers, targets[name]),
                met=name not in packing.missed,
                adapter=names[adapter],
                num_test=len(targets[name]),
                words=tested[name].words,
            )
            for adapter, trained in packing.adapters.items()
            for name in adapter
        ),
        adapters=tuple(
            AdapterReport(
                name, adapter, (own := packing.histories[adapter]).together, tuple(new for _, new in own.joins)
            )
            for adapter, name in names.items()
        ),
        rollbacks=tuple(
            RollbackReport(
                step.domains,
                step.into,
                {name: BrokenReport(*score, thresholds[name]) for name, score in step.broken.items()},
                tuple(name for name in step.domains if step.kept and name not in step.removed),
            )
            for step in packing.rollbacks
        ),
        timeline=timeline(packing),
        confusions=tuple(
            confusion
            for name, own in domains.items()
            if (confusion := confusion_of(name, own.splits.labels, tested[name].answers, targets[name])) is not None
        ),
        oracle=optimum,
        plan=plan.model_dump(mode="json"),
    )
    examples = {
        name: examples_of(own.splits.test, tested[name].answers, own.splits.labels, own.task, own.plan.question)
        for name, own in domains.items()
    }
    with replace_results(out) as folder:
        for adapter in report.adapters:
            place = folder / "adapters" / adapter.name
            state = session.cache.state_of(packing.histories[adapter.domains], adapter.domains)
            session.trainer.save(place, state, {name: tested[name].parameters or {} for name in adapter.domains})
            declared = [_domain(one, data, tested[one.name]) for one in report.domains if one.adapter == adapter.name]
            (place / DOMAINS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode({"domains": declared})) + b"\n")
            (place / "README.md").write_text(model_card(report, adapter))
        write_test_data(folder / "test", plan, {name: own.splits for name, own in domains.items()})
        (folder / "report.html").write_text(page(report, examples))
        report.write(folder / "report.json")
    data.features.keep_only({name for one in untrained.values() for name in one.pictures})
    return report


def answer_test_data(packing: Packing, session: Session) -> dict[str, Tested]:
    found = {}
    for adapter, history in packing.histories.items():
        for name in adapter:
            one = session.cache.tested(history, adapter, name, Tested, functools.partial(_test, session, name))
            kind = ANSWERS.get(session.data.domains[name].splits.task, int | str | None)
            found[name] = one._replace(answers=[msgspec.convert(answer, kind) for answer in one.answers])
    return found


def _test(session: Session, name: str) -> Tested:
    evaluator, own = session.trainer.evaluator, session.data.domains[name]
    with session.progress.work(f"testing {name}", len(own.test), "samples") as update:
        answered = Tested(evaluator.answers(name, own.test, update))
    if not isinstance(own.task, HeadObjective):
        return answered
    answered = answered._replace(parameters=evaluator.head_parameters(name))
    if not any(sample.answer for sample in own.test):
        return answered
    answers, targets = evaluator.answers(name, own.validation), [each.target for each in own.validation]
    return answered._replace(
        words=evaluator.accuracy_in_words(name, own.test),
        by_head=own.task.task.metrics(answers, targets)["accuracy"],  # type: ignore[arg-type]
        by_words=evaluator.accuracy_in_words(name, own.validation),
    )


def _domain(report: DomainReport, data: RunData, tested: Tested) -> DomainSummary:
    """A domain as its adapter's folder declares it. A way that alone can answer has the domain's metric."""
    own = data.domains[report.name]
    has_head = bool(own.task.num_outputs)
    by_head, by_words = tested.by_head, tested.by_words
    if by_head is None:
        by_head, by_words = (report.validation, None) if has_head else (None, report.validation)
    return DomainSummary(
        name=report.name,
        question=own.plan.question,
        head=report.name if has_head else None,
        answer="words" if by_head is None or by_head < (by_words or 0.0) else "head",
        head_accuracy=by_head,
        words_accuracy=by_words,
        threshold=report.threshold,
    )


def timeline(packing: Packing) -> tuple[StepReport, ...]:
    begins = itertools.accumulate((step.trained.seconds for step in packing.steps), initial=0.0)
    return tuple(
        StepReport(
            domains=step.domains,
            into=step.into,
            kept=step.kept,
            begin=begin,
            seconds=step.trained.seconds,
            values={name: score.value for name, score in step.trained.scores.items()},
            bounds={name: score.lower for name, score in step.trained.scores.items()},
            losses=step.trained.losses,
            removed=step.removed,
        )
        for step, begin in zip(packing.steps, begins, strict=False)
    )


def write_test_data(folder: Path, plan: Plan, splits: Mapping[str, Splits]) -> None:
    """Write some test samples of every domain as PNG with their labels, and a video if its source has one.

    FOLDER/DOMAIN/labels.json: [{"frames": [file, ...], "question": text, "label": text}, ...].
    FOLDER/DOMAIN/stream.json: {"video": file, "labels": one per second, or null}.
    """
    for domain in plan.domains:
        own = splits[domain.name]
        here = folder / domain.name
        here.mkdir(parents=True, exist_ok=True)
        entries = []
        for number, sample in enumerate(own.test[:_MAX_SAMPLES]):
            files = [f"{number:04d}-{place}.png" for place in range(len(sample.frames))]
            for file, frame in zip(files, sample.frames, strict=True):
                (here / file).write_bytes(cv2.imencode(".png", cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))[1].tobytes())
            question = sample.question or domain.question
            entries.append({"frames": files, "question": question, "label": answer_in_words(own, sample)})
        (here / "labels.json").write_text(json.dumps(entries, indent=1) + "\n")
        if domain.source in STREAMS:
            labels = STREAMS[domain.source](here / "stream.mp4", plan.seed)
            (here / "stream.json").write_text(json.dumps({"video": "stream.mp4", "labels": labels}) + "\n")


# Colour-blind safe: Okabe and Ito's palette, and two of Tol's colours.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#882255", "#44aa99", "#666666", "#e69f00")
_WIDTH, _HEIGHT, _LEFT = 640, 320, 48  # of the chart in report.html.j2


def lanes_of(steps: Sequence[StepReport], adapters: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each training, the index of the adapter that it went into or was rolled back from. For domains that did not
    fit when trained jointly: the adapter that holds most of them."""
    held = [{*(step.into or step.domains)} for step in steps]
    return tuple(max(range(len(adapters)), key=lambda number: len(own & {*adapters[number]})) for own in held)


def outcome_of(step: StepReport, thresholds: Mapping[str, float]) -> tuple[str, tuple[str, ...]]:
    """In words, whether a training was kept, and the domains with bounds below their thresholds."""
    low = tuple(name for name, bound in step.bounds.items() if bound < thresholds[name])
    if not step.kept:
        return "rolled back", low
    return "partly kept" if step.removed else "missed" if low else "kept", low


class CapacityPoint(NamedTuple):
    """A domain's value in an adapter with this number of domains."""

    domains: int
    value: float
    kept: bool


def capacity_points(steps: Sequence[StepReport]) -> dict[str, list[CapacityPoint]]:
    points: dict[str, list[CapacityPoint]] = {}
    for step in steps:
        for name, value in step.values.items():
            kept = step.kept and name not in step.removed
            points.setdefault(name, []).append(CapacityPoint(len(step.into) + len(step.domains), value, kept))
    return points


class Chart:
    """The capacity chart. curves: the name, colour and dashes of each domain; the colours repeat with dashes. most:
    domains in an adapter. floor: the lowest value."""

    def __init__(self, points: Mapping[str, Sequence[CapacityPoint]]) -> None:
        every = [point for own in points.values() for point in own]
        self.floor = max(0.0, int(min((point.value for point in every), default=0.0) * 10 - 0.5) / 10)
        self.most = max((point.domains for point in every), default=1)
        self.curves = [
            (name, COLORS[place % len(COLORS)], "6 4" if place // len(COLORS) % 2 else "")
            for place, name in enumerate(points)
        ]

    def x_of(self, count: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * (count - 0.7) / max(1.0, self.most - 0.4), 1)

    def y_of(self, value: float) -> float:
        return round(16 + (_HEIGHT - 16) * (1 - value) / (1 - self.floor), 1)


def ticks_of(total: float) -> list[float]:
    """At most about eight round numbers from 0 to a length."""
    step = next(size * 10.0**power for power in range(-3, 9) for size in (1, 2, 5) if total / (size * 10.0**power) <= 8)
    return [place * step for place in range(int(total / step) + 1)]


def page(report: FusionReport, examples: Mapping[str, Sequence[Example]]) -> str:
    """Render the page; its links to adapters are relative to its folder. examples: by domain."""
    loader = PackageLoader("fusion.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    thresholds = {domain.name: domain.threshold for domain in report.domains}
    points = capacity_points(report.timeline)
    total = max((step.begin + step.seconds for step in report.timeline), default=1.0)
    return environment.get_template("report.html.j2").render(
        report=report,
        rules={domain["name"]: _rule(domain["threshold"]) for domain in report.plan["domains"]},
        lanes=lanes_of(report.timeline, [adapter.domains for adapter in report.adapters]),
        outcome_of=functools.partial(outcome_of, thresholds=thresholds),
        total=total,
        ticks=ticks_of(total),
        lowest=min((value for step in report.timeline for value in step.values.values()), default=0.0),
        points=points,
        chart=Chart(points),
        examples=examples,
    )


def _rule(threshold: object) -> str:
    if not isinstance(threshold, Mapping):
        return "given"
    rule = str(threshold["relative_to"])
    return f"{rule} minus {threshold['minus']:g}" if threshold["minus"] else rule
