"""Entry points of `vlora fuse`: a plan in, adapters and a report out."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import cv2
from rich.console import Console

from fusion.data.samples import Splits
from fusion.embedded import checkpoint_path
from fusion.packing.algorithm import Packing, names_of
from fusion.packing.pipeline import (
    Verdict,
    fewest_trainings,
    packing_of,
    state_of,
    surely_alone,
    thresholds_of,
    verdict_of,
)
from fusion.plan.check import Checked, as_json, check, tell
from fusion.plan.estimate import estimate
from fusion.plan.mistakes import Mistakes
from fusion.plan.schema import Plan, read_plan_file
from fusion.progress.progress import Progress
from fusion.report.examples import confusion_of, examples_of
from fusion.report.page import page
from fusion.report.report import (
    AdapterReport,
    DomainReport,
    FusionReport,
    OracleReport,
    RollbackReport,
    StepReport,
    model_card,
)
from fusion.report.results import refuse_to_overwrite, replaced
from fusion.synthetic.sources import STREAMS
from fusion.training.checkpoint import Checkpoint, State, refuse_others
from fusion.training.fingerprint import hash_of_processing, identity_of
from fusion.training.kept import Kept
from fusion.training.objectives import answer_in_words
from fusion.training.parallel_jobs import Job, one_thread, side_by_side
from fusion.training.run_cache import Trainings
from fusion.training.run_lock import held
from fusion.training.train import Domain, FrozenBase, LoraTrainer
from fusion.training.zero_shot import score_before_training
from vlora.config import EngineConfig
from vlora.errors import BadConfig, BadPlan
from vlora.models import InputProcessor
from vlora.models.loading import load_model

_TEST_SHOWN = 100  # test samples per domain written to OUT/test


def fuse(
    plan_path: Path | str,
    out: Path | str,
    *,
    device: str = "cpu",
    resume: bool = False,
    restart: bool = False,
    oracle: bool = False,
    workers: int = 1,
    console: Console | None = None,
    kept: Kept | None = None,
) -> FusionReport:
    """Run a plan file and write OUT/adapters/NAME/ (PEFT format with heads), OUT/test/, OUT/report.json and
    OUT/report.html, all at the end of the run.

    Args:
        plan_path: the plan file.
        out: folder for the results and, during the run, for finished trainings.
        device: training device.
        resume: continue from the trainings in OUT/checkpoint of an earlier run.
        restart: delete these trainings and replace the results of an earlier run.
        oracle: also find the minimum number of adapters, which takes many more trainings.
        workers: number of parallel trainings; CPU only.
        console: output for progress and the report's table.
        kept: notified when an earlier run's trainings are deleted; from then on an interrupted run can be resumed.

    Raises:
        BadPlan: the plan or its data cannot be used.
        BadConfig: OUT contains the work of an earlier run and neither `resume` nor `restart` is given, or another
            process uses OUT.
    """
    if workers > 1 and not device.startswith("cpu"):
        raise BadConfig(f"workers is {workers}, but on {device} one process trains at a time; omit workers")
    if resume and restart:
        raise BadConfig("resume continues an earlier run and restart deletes it; give only one of the two")
    plan, console, out = read_plan_file(plan_path), console or Console(), Path(out)
    if out.exists() and not resume and not restart:
        with held(out):
            refuse_to_overwrite(out)
    with Progress(console) as progress:
        checked = check(plan, progress)
        with held(out):
            kept = kept or Kept(out, restart=restart)
            report = run(checked, out, kept, progress, device=device, resume=resume, oracle=oracle, workers=workers)
    console.print(report.table())
    if said := report.in_words():
        console.print(said, markup=False, highlight=False)
    return report


def explain(
    plan_path: Path | str, *, device: str = "cpu", json_out: bool = False, console: Console | None = None
) -> None:
    """Print what a plan file does, with a time estimate from a few measured steps.

    Args:
        plan_path: the plan file.
        device: device for the measured steps.
        json_out: print one line of JSON.
        console: output; progress goes to stderr.

    Raises:
        BadPlan: the plan or its data cannot be used; the message lists every mistake.
        BadConfig: the base model's weights or its processor cannot be loaded.
    """
    with Progress(Console(stderr=True)) as progress:
        checked = check(read_plan_file(plan_path), progress)
        estimated = estimate(checked.plan, checked.data, frozen_base(checked.plan, device, progress))
    console = console or Console()
    if json_out:
        console.out(as_json(checked, estimated), highlight=False)
    else:
        tell(checked, estimated, console)


def run(
    checked: Checked,
    out: Path,
    kept: Kept,
    progress: Progress,
    *,
    device: str,
    resume: bool,
    oracle: bool,
    workers: int,
) -> FusionReport:
    """Run a checked plan; see `fuse`. Deterministic for a seed, device and number of threads."""
    started = time.perf_counter()
    plan, data = checked.plan, checked.data
    splits = {name: own.splits for name, own in data.items()}
    base = frozen_base(plan, device, progress, features=out / "features")
    identity = identity_of(plan, splits, base.weights, hash_of_processing(base.processor), device, progress)
    if resume:  # refuse before any long work starts
        refuse_others(out / "checkpoint", identity)
    domains = prepared(checked, base)
    before = {name: score_before_training(domain) for name, domain in domains.items()}
    teachers = {name: own.taught for name, own in data.items() if own.taught is not None}
    first = surely_alone(plan, teachers)
    several = workers > 1
    with one_thread() if several else nullcontext():
        trainer = LoraTrainer(base, domains, plan, progress=progress)
        # Created only now, so that a plan that is refused above clears nothing.
        checkpoint = Checkpoint(out / "checkpoint", identity, resume=resume)
        kept.begun()
        trainings = Trainings(trainer, checkpoint, rehearsal=plan.training.rehearsal, progress=progress)
        progress.expect(fewest_trainings(plan, first))

        def ahead(jobs: Sequence[Job]) -> None:
            if several and jobs:
                progress.say(f"running {len(jobs)} trainings in parallel, {workers} at a time")
                side_by_side(jobs, workers, progress)

        ahead([partial(trainings, (name,)) for name in first])
        thresholds = thresholds_of(plan, trainings, teachers, progress.say)
        packing = packing_of(plan, domains, thresholds, trainings, progress.say, ahead)
        verdict = verdict_of(thresholds, trainings) if oracle else None
    tested: dict[str, list[object]] = {}
    words: dict[str, float | None] = {}
    for adapter in packing.adapters:
        trainer.restore(state_of(plan, adapter, trainings))
        for name in adapter:
            own = domains[name]
            with progress.work(f"testing {name}", len(own.test), "samples") as moved:
                tested[name] = trainer.answers(name, own.test, moved)
            beside_head = own.task.num_outputs and any(sample.answer for sample in own.test)
            words[name] = trainer.in_words(name, own.test) if beside_head else None
    names = names_of(packing.adapters)
    targets = {name: [sample.target for sample in own.test] for name, own in domains.items()}
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
                before=before[name],
                validation=trained.scores[name].value,
                bound=trained.scores[name].lower,
                after=domains[name].task.metric(tested[name], targets[name]),
                met=name not in packing.missed,
                adapter=names[adapter],
                num_test=len(domains[name].test),
                words=words[name],
            )
            for adapter, trained in packing.adapters.items()
            for name in adapter
        ),
        adapters=tuple(AdapterReport(name, adapter) for adapter, name in names.items()),
        rollbacks=tuple(
            RollbackReport(step.domains, step.into, {name: score.value for name, score in step.broken.items()})
            for step in packing.rollbacks
        ),
        timeline=timeline(packing),
        confusions=tuple(
            confusion
            for name, own in domains.items()
            if (confusion := confusion_of(name, own.splits.labels, tested[name], targets[name])) is not None
        ),
        oracle=None if verdict is None else _told(verdict),
        plan=plan.model_dump(mode="json"),
    )
    states = {name: state_of(plan, adapter, trainings) for adapter, name in names.items()}
    examples = {
        name: examples_of(own.splits.test, tested[name], own.splits.labels, own.task, own.plan.question)
        for name, own in domains.items()
    }
    with replaced(out) as folder:
        _write_adapters(folder / "adapters", report, trainer, states)
        write_test_data(folder / "test", plan, splits)
        (folder / "report.html").write_text(page(report, examples))
        report.write(folder / "report.json")
    shutil.rmtree(out / "features")  # much larger than the results, and recomputed within seconds
    return report


def frozen_base(plan: Plan, device: str, progress: Progress, *, features: Path | None = None) -> FrozenBase:
    """Load the plan's base model. Raises BadConfig if a part of it is missing."""
    path = checkpoint_path() if plan.base == "embedded" else plan.base
    processor = InputProcessor.from_pretrained(path)
    model = load_model(EngineConfig(model=path, device=device, dtype="float32"))
    return FrozenBase(model, processor, features=features, train_vision=plan.lora.vision, progress=progress)


def prepared(checked: Checked, base: FrozenBase) -> dict[str, Domain]:
    """Encode every domain. Raises BadPlan, with the place in the plan, for data that the base model cannot process."""
    mistakes = Mistakes(checked.text)
    domains = {}
    for place, domain in enumerate(checked.plan.domains):
        try:
            domains[domain.name] = Domain(domain, checked.data[domain.name].splits, base)
        except BadPlan as error:
            mistakes.inside("domains", place).add(str(error))
    mistakes.refuse()
    return domains


def timeline(packing: Packing) -> tuple[StepReport, ...]:
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
            )
        )
        begin += step.trained.seconds
    return tuple(steps)


def _write_adapters(folder: Path, report: FusionReport, trainer: LoraTrainer, states: Mapping[str, State]) -> None:
    for adapter in report.adapters:
        trainer.save(folder / adapter.name, states[adapter.name])
        (folder / adapter.name / "README.md").write_text(model_card(report, adapter))


def _told(verdict: Verdict) -> OracleReport:
    bound, best = verdict.bound, verdict.optimum
    optimum = None if best is None else tuple(tuple(sorted(together)) for together in best.adapters)
    return OracleReport(bound.adapters, bound.missed, bound.conflicts, optimum)


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
        for number, sample in enumerate(own.test[:_TEST_SHOWN]):
            files = [f"{number:04d}-{place}.png" for place in range(len(sample.frames))]
            for file, frame in zip(files, sample.frames, strict=True):
                cv2.imwrite(str(here / file), cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
            question = sample.question or domain.question
            entries.append({"frames": files, "question": question, "label": answer_in_words(own, sample)})
        (here / "labels.json").write_text(json.dumps(entries, indent=1) + "\n")
        if domain.source in STREAMS:
            labels = STREAMS[domain.source](here / "stream.mp4", plan.seed)
            (here / "stream.json").write_text(json.dumps({"video": "stream.mp4", "labels": labels}) + "\n")
