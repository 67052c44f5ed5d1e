"""Phase 6: the adapters are tested, and the results and their report are written."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from fusion.data.samples import Splits
from fusion.packing.algorithm import Adapter, Packing, names_of
from fusion.phases.base_scored import BaseScored
from fusion.phases.data_ready import DataReady
from fusion.phases.packing import OracleResult
from fusion.phases.session import Session
from fusion.phases.thresholds import Thresholds
from fusion.plan.schema import Plan
from fusion.report.charts import capacity_chart, capacity_points, curves_of, lanes_of, outcome_of, ticks_of
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
from fusion.report.results import former_adapters, replace_results
from fusion.synthetic.sources import STREAMS
from fusion.training.objectives import HeadObjective, answer_in_words
from vlora.adapter_files import DOMAINS_FILE
from vlora.types.domain import DomainSummary

_MAX_SAMPLES = 100  # per domain


@dataclasses.dataclass(frozen=True)
class Tested:
    """Results on test data, by domain.

    answers: of the adapter, in the form that the domain's metric compares. words: share of samples that the language
    model answers word for word, if a head answers and its answers have words; else None. by_head, by_words: by domain
    with both, shares of validation samples that each way answers right.
    """

    answers: Mapping[str, list[object]]
    words: Mapping[str, float | None]
    by_head: Mapping[str, float]
    by_words: Mapping[str, float]


def report_run(
    data: DataReady,
    base: BaseScored,
    thresholds: Thresholds,
    packing: Packing,
    optimum: OracleResult | None,
    session: Session,
    out: Path,
    started: float,
) -> FusionReport:
    """Test the adapters and write all results to OUT, where they replace those of an earlier run.

    Args:
        started: start time of the run, by `time.perf_counter`.
    """
    tested = answer_test_data(data, packing, session)
    names = names_of(packing.adapters, data.plan.name, former_adapters(out), tuple(data.domains))
    report = make_report(data, base, thresholds, packing, optimum, tested, names, time.perf_counter() - started)
    states = {name: session.state(packing, adapter) for adapter, name in names.items()}
    examples = {
        name: examples_of(own.splits.test, tested.answers[name], own.splits.labels, own.task, own.plan.question)
        for name, own in data.domains.items()
    }
    with replace_results(out) as folder:
        for adapter in report.adapters:
            place = folder / "adapters" / adapter.name
            session.trainer.save(place, states[adapter.name])
            domains = [_domain(one, data, tested) for one in report.domains if one.adapter == adapter.name]
            (place / DOMAINS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode({"domains": domains})) + b"\n")
            (place / "README.md").write_text(model_card(report, adapter))
        write_test_data(folder / "test", data.plan, {name: own.splits for name, own in data.domains.items()})
        (folder / "report.html").write_text(page(report, examples))
        report.write(folder / "report.json")
    shutil.rmtree(out / "features")  # much larger than the results, and recomputed within seconds
    return report


def answer_test_data(data: DataReady, packing: Packing, session: Session) -> Tested:
    """Answer every domain's test samples with its adapter."""
    evaluator, progress = session.trainer.evaluator, session.progress
    answers: dict[str, list[object]] = {}
    words: dict[str, float | None] = {}
    by_head: dict[str, float] = {}
    by_words: dict[str, float] = {}
    for adapter in packing.adapters:
        session.trainer.adapter.restore(session.state(packing, adapter))
        for name in adapter:
            own = data.domains[name]
            with progress.work(f"testing {name}", len(own.test), "samples") as update:
                answers[name] = evaluator.answers(name, own.test, update)
            has_both = own.task.num_outputs and any(sample.answer for sample in own.test)
            words[name] = evaluator.accuracy_in_words(name, own.test) if has_both else None
            if has_both and isinstance(own.task, HeadObjective):
                found, targets = evaluator.answers(name, own.validation), [each.target for each in own.validation]
                by_head[name] = own.task.task.metrics(found, targets)["accuracy"]  # type: ignore[arg-type]
                by_words[name] = evaluator.accuracy_in_words(name, own.validation)
    return Tested(answers, words, by_head, by_words)


def _domain(report: DomainReport, data: DataReady, tested: Tested) -> DomainSummary:
    """A domain as its adapter's folder declares it. A way that alone can answer has the domain's metric."""
    name, has_head = report.name, bool(data.domains[report.name].task.num_outputs)
    by_head = tested.by_head.get(name, report.validation if has_head else None)
    by_words = tested.by_words.get(name, None if has_head else report.validation)
    return DomainSummary(
        name=name,
        question=data.domains[name].plan.question,
        head=name if has_head else None,
        answer="words" if by_head is None or by_head < (by_words or 0.0) else "head",
        head_accuracy=by_head,
        words_accuracy=by_words,
        threshold=report.threshold,
    )


def make_report(
    data: DataReady,
    base: BaseScored,
    thresholds: Thresholds,
    packing: Packing,
    optimum: OracleResult | None,
    tested: Tested,
    names: Mapping[Adapter, str],
    seconds: float,
) -> FusionReport:
    """The report of a run. names: of its adapters. seconds: its duration."""
    plan, domains = data.plan, data.domains
    targets = {name: [sample.target for sample in own.test] for name, own in domains.items()}
    return FusionReport(
        base=plan.base,
        seed=plan.seed,
        seconds=seconds,
        confidence=plan.confidence,
        domains=tuple(
            DomainReport(
                name=name,
                task=domains[name].splits.task,
                real_or_synthetic="real" if domains[name].splits.real else "synthetic",
                metric=domains[name].task.metric_name,
                threshold=thresholds.values[name],
                before=base.scores[name],
                validation=trained.scores[name].value,
                bound=trained.scores[name].lower,
                after=domains[name].task.metric(tested.answers[name], targets[name]),
                met=name not in packing.missed,
                adapter=names[adapter],
                num_test=len(domains[name].test),
                words=tested.words[name],
            )
            for adapter, trained in packing.adapters.items()
            for name in adapter
        ),
        adapters=tuple(_adapter_report(plan, packing, adapter, name) for adapter, name in names.items()),
        rollbacks=tuple(
            RollbackReport(
                step.domains,
                step.into,
                {name: BrokenReport(*score, thresholds.values[name]) for name, score in step.broken.items()},
                tuple(name for name in step.domains if step.kept and name not in step.removed),
            )
            for step in packing.rollbacks
        ),
        timeline=timeline(packing),
        confusions=tuple(
            confusion
            for name, own in domains.items()
            if (confusion := confusion_of(name, own.splits.labels, tested.answers[name], targets[name])) is not None
        ),
        oracle=None if optimum is None else _oracle_report(optimum),
        plan=plan.model_dump(mode="json"),
    )


def _adapter_report(plan: Plan, packing: Packing, adapter: Adapter, name: str) -> AdapterReport:
    if adapter in packing.histories:
        history = packing.histories[adapter]
        return AdapterReport(name, adapter, history.together, tuple(domain for _, domain in history.joins))
    together = adapter if plan.packing == "jointly" else adapter[:1]
    return AdapterReport(name, adapter, together, adapter[len(together) :])


def timeline(packing: Packing) -> tuple[StepReport, ...]:
    """The trainings of a packing in their order, one after the other."""
    begin = 0.0
    steps = []
    for step in packing.steps:
        scores = step.trained.scores
        steps.append(
            StepReport(
                domains=step.domains,
                into=step.into,
                kept=step.kept,
                begin=begin,
                seconds=step.trained.seconds,
                values={name: score.value for name, score in scores.items()},
                bounds={name: score.lower for name, score in scores.items()},
                losses=step.trained.losses,
                removed=step.removed,
            )
        )
        begin += step.trained.seconds
    return tuple(steps)


def _oracle_report(result: OracleResult) -> OracleReport:
    bound, best = result.bound, result.optimum
    adapters = None if best is None else tuple(tuple(sorted(together)) for together in best.adapters)
    return OracleReport(bound.adapters, bound.missed, bound.conflicts, adapters)


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


def page(report: FusionReport, examples: Mapping[str, Sequence[Example]]) -> str:
    """Render the page; its links to adapters are relative to its folder. examples: by domain."""
    environment = Environment(
        loader=PackageLoader("fusion.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
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
        capacity=capacity_chart(points) if points else "",
        curves=curves_of(points),
        examples=examples,
    )


def _rule(threshold: object) -> str:
    """The rule that set a threshold."""
    if not isinstance(threshold, Mapping):
        return "given"
    rule = str(threshold["relative_to"])
    return f"{rule} minus {threshold['minus']:g}" if threshold["minus"] else rule
