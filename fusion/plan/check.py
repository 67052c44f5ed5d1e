"""`vlora fuse --check`: describe a plan's run without training."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console

from fusion.data.load import DomainData, load_domains
from fusion.data.samples import Sample
from fusion.data.targets import labels_shown
from fusion.packing.pipeline import most_trainings
from fusion.plan.estimate import Estimate
from fusion.plan.families import refuse_heads
from fusion.plan.lora_size import LoraSize, lora_size, shapes_of
from fusion.plan.mistakes import Mistakes, PlanText
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, PlanFile, RelativeThreshold
from fusion.plan.tasks import HEADS, METRICS, SAID, WORDS
from fusion.progress.display import duration
from fusion.progress.progress import Progress
from fusion.teachers.labelling import threshold_before_training
from fusion.training.objectives import answer_in_words
from heads import TASKS

_CLASSES_TOLD = 12


@dataclasses.dataclass(frozen=True)
class Checked:
    """A plan that can be run, with the text it was read from. data: by domain name."""

    plan: Plan
    text: PlanText
    data: Mapping[str, DomainData]
    size: LoraSize


@dataclasses.dataclass(frozen=True)
class DomainCheck:
    """Summary of one domain.

    counts: number of samples per part. classes: per label, the number of samples with it, per part. answers: number of
    distinct training answers. threshold: its value if known before training, else None. also_in_words: the language
    model also learns the head's answers.
    """

    name: str
    task: str
    real_or_synthetic: str
    question: str
    head: str
    metric: str
    threshold: float | None
    promise: str
    counts: dict[str, int]
    classes: dict[str, dict[str, int]]
    answers: int
    frames: int
    teacher: dict[str, object] | None
    also_in_words: bool


def check(file: PlanFile, progress: Progress | None = None) -> Checked:
    """Check a plan and its data before training.

    Args:
        progress: display for reading pictures and labelling by teachers.

    Raises:
        BadPlan: lists every mistake found.
    """
    plan, mistakes = file.plan, Mistakes(file.text)
    seam = shapes_of(plan, mistakes)
    size = None if seam is None else lora_size(plan, seam, mistakes)
    data = load_domains(plan, mistakes, progress)
    if seam is not None:
        refuse_heads(plan, {name: own.splits.task for name, own in data.items()}, seam.config, mistakes)
    mistakes.refuse()
    assert size is not None, "a missing size has been refused as a mistake"
    return Checked(plan, file.text, data, size)


def explain(checked: Checked) -> list[DomainCheck]:
    """Return a summary of each domain."""
    return [_domain(domain, checked.plan, checked.data[domain.name]) for domain in checked.plan.domains]


def as_json(checked: Checked, estimate: Estimate) -> str:
    plan, size = checked.plan, checked.size
    return json.dumps(
        {
            "base": plan.base,
            "seed": plan.seed,
            "lora": {
                **plan.lora.model_dump(mode="json"),
                "layers": size.layers,
                "parameters": size.parameters,
                "bytes": size.num_bytes,
            },
            "training": plan.training.model_dump(mode="json"),
            "order": plan.order,
            "packing": plan.packing,
            "confidence": plan.confidence,
            "training_s_at_most": _longest(plan),
            "estimate": dataclasses.asdict(estimate),
            "domains": [dataclasses.asdict(domain) for domain in explain(checked)],
        }
    )


def tell(checked: Checked, estimate: Estimate, console: Console) -> None:
    """Print the check in readable form."""
    for domain in explain(checked):
        kind = f"{domain.task}, answered by {_answered(domain)}, on {domain.real_or_synthetic} pixels"
        rows = {
            "question": domain.question,
            "samples": ", ".join(f"{count} {part}" for part, count in domain.counts.items())
            + f", {_frames(domain)} each",
            "classes" if domain.classes else "answers": _shown(domain),
            "threshold": domain.promise,
            "teacher": _taught(domain.teacher),
        }
        _block(console, f"{domain.name}: {kind}", rows)
    plan, size, training = checked.plan, checked.size, checked.plan.training
    where = "language model and vision side" if plan.lora.vision else "language model"
    in_order = "" if plan.packing == "jointly" else f"order {' and '.join(plan.order)}, "
    rows = {
        "adapter": f"{_kind(plan.lora)}, on "
        f"{size.layers} layers of the {where}: {size.parameters:,} parameters, {size.num_bytes / 1e6:.1f} MB",
        "training": f"{training.steps} steps of {training.batch_size} samples per domain"
        + (
            ", all domains of an adapter at once"
            if plan.packing == "jointly"
            else f"; {training.rehearsal:.0%} of each batch rehearses domains that the adapter already holds"
        ),
        "packing": f"{plan.packing}, {in_order}seed {plan.seed}, decided by "
        + (f"lower bounds at a confidence of {plan.confidence:g}" if plan.confidence else "the score itself"),
        "time": _time(plan, estimate),
    }
    _block(console, f"run: {len(plan.domains)} domain{'s' * (len(plan.domains) > 1)} on {plan.base}", rows)


def _kind(lora: LoraPlan) -> str:
    blocks, each = (f" in {lora.blocks} blocks", f"rank / {lora.blocks}") if lora.blocks > 1 else ("", "rank")
    return f"rank {lora.rank}{blocks}, alpha {lora.alpha}{f' / sqrt({each})' if lora.rslora else ''}"


def _block(console: Console, title: str, rows: Mapping[str, str]) -> None:
    lines = [title, *(f"  {name:9} {text}" for name, text in rows.items() if text)]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _answered(domain: DomainCheck) -> str:
    if domain.head == WORDS:
        return "the language model in words"
    head = f"{'an' if domain.head[0] in 'aeiou' else 'a'} {domain.head} head"
    return f"{head} (and in words; the report gives both accuracies)" if domain.also_in_words else head


def _frames(domain: DomainCheck) -> str:
    return "one picture" if domain.frames == 1 else f"{domain.frames} frames"


def _domain(domain: DomainPlan, plan: Plan, data: DomainData) -> DomainCheck:
    splits = data.splits
    metric = domain.metric or METRICS[splits.task][0]
    value = threshold_before_training(domain, data.taught)
    return DomainCheck(
        name=domain.name,
        task=domain.task or splits.task,
        real_or_synthetic="real" if splits.real else "synthetic",
        question=domain.question,
        head=domain.head or HEADS[splits.task][0],
        metric=metric,
        threshold=value,
        promise=_promise(domain, plan, data, metric, value),
        counts={name: len(part) for name, part in splits.parts.items()},
        classes=_classes(splits.task, splits.labels, splits.parts),
        answers=len({str(sample.target) for sample in splits.train}),
        frames=splits.num_frames,
        teacher=None if data.teaching is None else dataclasses.asdict(data.teaching),
        also_in_words=splits.task in TASKS and any(answer_in_words(splits, sample) for sample in splits.train),
    )


def _promise(domain: DomainPlan, plan: Plan, data: DomainData, metric: str, value: float | None) -> str:
    what = f"{metric} ({SAID[metric]})" if SAID[metric] != metric else metric
    if value is None:
        assert isinstance(domain.threshold, RelativeThreshold)
        said = f"{what} of at least the score of an adapter for this domain alone, minus {domain.threshold.minus:g}"
    else:
        said = f"{what} of at least {value:.3f}"
    if isinstance(domain.threshold, RelativeThreshold) and value is not None and data.teaching is not None:
        said += f" (its teacher's {data.teaching.score:.3f} minus {domain.threshold.minus:g})"
    return f"{said}, at a confidence of {plan.confidence:g}" if plan.confidence else said


def _classes(task: str, labels: tuple[str, ...], parts: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, int]]:
    shown = {
        name: Counter(itertools.chain.from_iterable(labels_shown(task, sample.target) for sample in part))
        for name, part in parts.items()
    }
    if task == "regression":
        return {}
    return {label: {name: shown[name][number] for name in parts} for number, label in enumerate(labels)}


def _shown(domain: DomainCheck) -> str:
    if not domain.classes:
        return f"{domain.answers} distinct answers in the training data"
    told = [f"{label} {' / '.join(map(str, counts.values()))}" for label, counts in domain.classes.items()]
    more = len(told) - _CLASSES_TOLD
    return ", ".join(told[:_CLASSES_TOLD]) + (f" and {more} more" if more > 0 else "")


def _taught(teacher: Mapping[str, object] | None) -> str:
    if teacher is None:
        return ""
    left = f"dropped for low confidence: {teacher['dropped']} samples, {teacher['dropped_boxes']} boxes"
    beyond = f"; {teacher['beyond']} answers outside the labels" if teacher["beyond"] else ""
    return f"{teacher['name']}: {teacher['score']:.3f} on validation data; {left}{beyond}"


def _time(plan: Plan, estimate: Estimate) -> str:
    least, most = duration(estimate.at_least_s), duration(estimate.at_most_s)
    if plan.packing == "jointly":
        fits = "if all domains fit into one adapter"
    else:
        fits = "if every domain fits into the first adapter"
    said = f"about {least} {fits}, at most {most}" if least != most else f"about {least}"
    threads = "" if estimate.threads is None else f", {estimate.threads} thread{'s' * (estimate.threads > 1)}"
    measured = (
        f"{estimate.measured_steps} step{'s' * (estimate.measured_steps > 1)} of {estimate.measured_samples} samples"
    )
    return (
        f"{said}; estimated from {measured} measured on this machine ({estimate.device}{threads}): "
        f"{estimate.step_s:.2f} s per step of {estimate.batch_size}"
    )


def _longest(plan: Plan) -> float | None:
    """Seconds of training in the longest possible run; None if the plan sets no limit."""
    return None if plan.training.seconds is None else plan.training.seconds * most_trainings(plan)
