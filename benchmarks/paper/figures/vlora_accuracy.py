"""V-LoRA's figures of accuracy, on the embedded model: gains by adapters, fused domains, small models (3 and 6.2)."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapters import base_of, cut, plan_of, trainer_of
from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measuring import Measuring
from benchmarks.rivals import RIVALS, SmallModel, export
from fusion.data.samples import Splits
from fusion.plan.schema import LoraPlan
from fusion.synthetic.sources import load_source
from fusion.teachers.built_in import TEACHERS
from fusion.training.objectives import objective_of
from fusion.training.trainer import LoraTrainer
from fusion.training.zero_shot import score_before_training
from vlora.bench.report import Goal

_QUESTIONS = {
    "sklearn-digits": "what digit is shown ?",
    "drawn-signs": "what sign is shown ?",
    "library-photos": "what does the photo show ?",
    "drawn-actions": "what happens in the video ?",
    "drawn-traffic-detection": "find all vehicles and persons .",
    "drawn-traffic-questions": "what is on the road ?",
    "drawn-traffic-references": "where is it ?",
    "drawn-traffic-counts": "how many vehicles are there ?",
    "drawn-traffic-persons": "is there a person ?",
}
_TASKS = {
    "image classification": "sklearn-digits",
    "object detection": "drawn-traffic-detection",
    "video classification": "drawn-actions",
    "visual questions": "drawn-traffic-questions",
    "referring": "drawn-traffic-references",
}
_FAMILIES = {
    "classification": ("sklearn-digits", "drawn-signs", "library-photos"),
    "one street, many tasks": (
        "drawn-traffic-persons",
        "drawn-traffic-counts",
        "drawn-traffic-detection",
        "drawn-traffic-questions",
    ),
}


def _trainer(sources: Sequence[str], steps: int, batch: int, quick: bool) -> LoraTrainer:
    questions = {source: (source, _QUESTIONS[source]) for source in sources}
    plan = plan_of(questions, 0, steps, batch, lora=LoraPlan(rank=8, alpha=16))
    return trainer_of(plan, base_of(), {source: _splits(source, plan.seed, quick) for source in sources})


def _splits(source: str, seed: int, quick: bool) -> Splits:
    """A source's samples; quick: the first of each part."""
    splits = load_source(source, seed)
    return cut(splits, 300, 100, 120) if quick else splits


# -- Figures 4 and 15 -------------------------------------------------------------------------------------------------


def _shared_tasks(measuring: Measuring) -> dict[str, Any]:
    found: dict[str, Any] = measuring.once("accuracy", lambda: _measure_tasks(measuring.setting.quick))
    return found


def _measure_tasks(quick: bool) -> dict[str, Any]:
    """Test scores by task, of the model before training and with an adapter."""
    trainer = _trainer(list(_TASKS.values()), 40 if quick else 160, 32 if quick else 16, quick)
    domains = trainer.domains
    before = {name: score_before_training(domain) for name, domain in domains.items()}
    rows: dict[str, dict[str, float]] = {}
    for task, source in _TASKS.items():
        trainer.adapter.reset()
        trainer.train(source, ())
        domain = domains[source]
        rows[task] = {
            "before": 100 * before[source],
            "adapter": 100 * trainer.evaluator.score(source, domain.test),
        }
    return {"tasks": rows, "test samples": {task: len(domains[name].test) for task, name in _TASKS.items()}}


def _measure_rivals(measuring: Measuring) -> dict[str, Any]:
    """The test scores of `_measure_tasks`, and those of a small model where there is one."""
    quick = measuring.setting.quick
    rows: dict[str, dict[str, float | None]] = {}
    for task, scores in _shared_tasks(measuring)["tasks"].items():
        source = _TASKS[task]
        splits = _splits(source, 0, quick)
        answers = _small_model_answers(source, splits, quick)
        small = None
        if answers is not None:
            targets = [sample.target for sample in splits.test]
            small = 100 * float(objective_of(splits).metric(answers, targets))
        rows[task] = {**scores, "small model": small}
    return {"tasks": rows}


def _small_model_answers(source: str, splits: Splits, quick: bool) -> list[Any] | None:
    """Of the source's rival, otherwise of its built-in teacher; None if it has neither."""
    if source in RIVALS:
        model = RIVALS[source].train(splits, seed=0, steps=60 if quick else None)
        with tempfile.TemporaryDirectory() as folder:
            export(model, splits, Path(folder) / "model.onnx")
            return SmallModel(Path(folder) / "model.onnx", splits, threads=1).answers(splits.test)
    if source in TEACHERS:
        teacher = TEACHERS[source]()
        teacher.fit(splits)
        return teacher.answers(splits.test)
    return None


_GAINS = ("image classification", "object detection", "video classification")


def _gain_panels(found: Found) -> list[Panel]:
    return _score_panels(found, _GAINS, {"without an adapter": "before", "with an adapter": "adapter"})


def _score_panels(found: Found, tasks: Sequence[str], labels: Mapping[str, str]) -> list[Panel]:
    series = {label: [found["tasks"][task][name] for task in tasks] for label, name in labels.items()}
    return [drawing.bars([*map(drawing.wrapped, tasks)], series, ylabel="test score, %", ylim=(0, 118))]


def _gains_here(found: Found) -> dict[str, float | None]:
    return {task: found["tasks"][task]["adapter"] - found["tasks"][task]["before"] for task in _GAINS}


def _gain_goals(found: Found) -> list[Goal]:
    worst = min(value for value in _gains_here(found).values() if value is not None)
    return [Goal("fig4: gain by an adapter, percentage points, worst task", worst, 0.0, False)]


def _task_panels(found: Found) -> list[Panel]:
    labels = {"small model": "small model", "the model with an adapter": "adapter", "the model alone": "before"}
    return _score_panels(found, list(found["tasks"]), labels)


# -- Figure 5 ---------------------------------------------------------------------------------------------------------


def _measure_fused(measuring: Measuring) -> dict[str, Any]:
    """Test scores of domains trained jointly into one adapter, by how many, and of each alone."""
    quick = measuring.setting.quick
    found: dict[str, Any] = {}
    for family, sources in _FAMILIES.items():
        own = sources[:3] if quick else sources
        # 21 single-domain trainings: with larger batches they would take most of a whole run's time.
        trainer = _trainer(own, 30 if quick else 120, 16, quick)
        fused = []
        for count in range(1, len(own) + 1):
            fused.append(_trained(trainer, own[:count]))
        alone = {source: _trained(trainer, (source,))[source] for source in own[1:]} | fused[0]
        found[family] = {"alone": alone, "fused": fused}
    return found


def _trained(trainer: LoraTrainer, names: Sequence[str]) -> dict[str, float]:
    trainer.adapter.reset()
    trainer.train_together(names)
    return {name: trainer.evaluator.score(name, trainer.domains[name].test) for name in names}


def _fused_panels(found: Found) -> list[Panel]:
    kept = _kept(found)
    longest = max(map(len, kept.values()))
    padded = {family: [*values, *[None] * (longest - len(values))] for family, values in kept.items()}
    label = "% of the score of an adapter of its own, mean"
    numbers = range(1, longest + 1)
    return [drawing.lines(padded, numbers, xlabel="domains fused into one adapter", ylabel=label, xticks=numbers)]


def _kept(found: Found) -> dict[str, list[float]]:
    return {
        family: [
            100 * statistics.fmean(value / max(own["alone"][name], 0.01) for name, value in scores.items())
            for scores in own["fused"]
        ]
        for family, own in found.items()
    }


def _fused_here(found: Found) -> dict[str, float | None]:
    return {"classification, all in one adapter": _kept(found)["classification"][-1]}


CODE = {
    "v-lora:fig4": Code(_shared_tasks, _gain_panels, _gains_here, _gain_goals),
    "v-lora:fig5": Code(_measure_fused, _fused_panels, _fused_here),
    "v-lora:fig15": Code(_measure_rivals, _task_panels),
}
