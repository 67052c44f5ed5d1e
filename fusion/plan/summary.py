"""`vlora fuse --check`: a description of a plan's run, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from fusion.data.load import DomainData
from fusion.data.targets import answer_in_words, label_counts
from fusion.packing.guided import num_trainings, trained_alone
from fusion.plan import schema
from fusion.plan.check import PlanChecked, check_plan
from fusion.progress import Progress, duration
from vlora.run_folder import whole

if TYPE_CHECKING:
    from fusion.plan.estimate import Estimate

_MAX_CLASSES = 12
_BETTER = 0.05  # what an adapter exceeds an absolute threshold by, for the number of samples

# Of detection heads of the embedded model, by training pictures (docs/decisions/0070).
_F1_OF_DRAWINGS = {60: 0.44, 120: 0.62, 240: 0.76, 480: 0.88}
_F1_OF_PHOTOS = (349, 0.39)

POWER = 0.8  # probability with which a good adapter passes
MOST = 5_000


@dataclasses.dataclass(frozen=True)
class DomainSummary:
    """Summary of one domain.

    counts: number of samples per part. needs: number of validation samples that the threshold needs
    (`samples_needed`); None without a confidence, or if it is too large to be computed. better: by how
    much an adapter must exceed the threshold for that. classes: per label, the number of samples with it, per part.
    answers: number of distinct training answers. threshold: its value if known before training, else None.
    also_in_words: the language model also learns the head's answers. notes: of the readers of its data.
    """

    name: str
    task: str
    real_or_synthetic: str
    question: str
    head: str
    metric: str
    threshold: float | None
    rule: str
    counts: dict[str, int]
    needs: int | None
    better: float
    classes: dict[str, dict[str, int]]
    answers: int
    frames: int
    teacher: dict[str, object] | None
    also_in_words: bool
    notes: tuple[str, ...]


def explain(
    plan: schema.PlanFile | Path | str,
    *,
    device: str = "cpu",
    json_out: bool = False,
    sheet: Path | None = None,
) -> None:
    """Print what a plan file does, with estimates of time, memory and disk from a few measured steps.

    Args:
        json_out: print one line of JSON.
        sheet: PNG file for a contact sheet of the data, with labels and boxes.

    Raises:
        BadPlan: the plan or its data cannot be used; the message lists every error.
        BadConfig: the base model's weights or its processor cannot be loaded.
    """
    with Progress(Console(stderr=True)) as progress:
        checked = check_plan(schema.read_plan_file(plan), progress)
        from fusion.plan.estimate import estimate  # errors in the plan need no torch
        from fusion.report.examples import contact_sheet
        from fusion.training.frozen_base import load_frozen_base

        if sheet is not None:
            try:
                with whole(sheet, durable=False) as part:
                    contact_sheet({name: data.splits for name, data in checked.data.items()}).save(part, "PNG")
                progress.say(f"contact sheet of the data, with labels and boxes: {sheet}")
            except OSError as error:  # the check goes on
                progress.say(f"no contact sheet of the data: {sheet} cannot be written: {error.strerror}")
        estimated = estimate(checked.plan, checked.data, load_frozen_base(checked.plan, device, progress))
    console = Console()
    if json_out:
        console.out(as_json(checked, estimated), highlight=False)
    else:
        print_summary(checked, estimated, console)


def summarize(checked: PlanChecked) -> list[DomainSummary]:
    return [_domain(domain, checked.plan, checked.data[domain.name]) for domain in checked.plan.domains]


def as_json(checked: PlanChecked, estimate: Estimate) -> str:
    plan, size = checked.plan, checked.size
    training_s = None  # processor seconds of training in the longest possible run
    if plan.training.seconds is not None:
        training_s = plan.training.seconds * num_trainings(plan, trained_alone(plan, checked.teacher_scores))[1]
    return json.dumps(
        {
            "base": plan.base,
            "quantize": plan.quantize,
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
            "training_s_at_most": training_s,
            "estimate": dataclasses.asdict(estimate),
            "domains": [dataclasses.asdict(domain) for domain in summarize(checked)],
        }
    )


def print_summary(checked: PlanChecked, estimate: Estimate, console: Console) -> None:
    domains, plan, size = summarize(checked), checked.plan, checked.size
    for domain in domains:
        kind = f"{domain.task}, answered by {_answered(domain)}, on {domain.real_or_synthetic} pixels"
        rows = {
            "question": domain.question,
            "samples": ", ".join(f"{count} {part}" for part, count in domain.counts.items())
            + f", {'one picture' if domain.frames == 1 else f'{domain.frames} frames'} each",
            "power": _sample_size(domain, checked.plan.confidence),
            "classes" if domain.classes else "answers": _shown(domain),
            "threshold": domain.rule,
            "teacher": _teacher(domain.teacher),
            "expected": _expected(plan, domain),
            **{f"note {number}": note for number, note in enumerate(domain.notes, 1)},
        }
        _block(console, f"{domain.name}: {kind}", rows)
    where = "language model and vision side" if plan.lora.vision else "language model"
    in_order = "" if plan.packing in ("guided", "jointly") else f"order {' and '.join(plan.order)}, "
    rounded = "" if plan.quantize == "none" else f", its weights in {plan.quantize}"
    rows = {
        "adapter": f"{_kind(plan.lora)}, on "
        f"{size.layers} layers of the {where}: {size.parameters:,} parameters, {size.num_bytes / 1e6:.1f} MB",
        "training": _training(plan, domains),
        "packing": f"{plan.packing}, {in_order}seed {plan.seed}, decided by "
        + (f"lower bounds at a confidence of {plan.confidence:g}" if plan.confidence else "the score itself"),
        "time": _time(plan, estimate),
        "memory": f"about {estimate.memory_bytes / 2**30:.1f} GiB, the most that these steps took",
        "disk": _disk(size.num_bytes, domains, estimate),
    }
    _block(console, f"run: {len(plan.domains)} domain{'s' * (len(plan.domains) > 1)} on {plan.base}{rounded}", rows)


def _training(plan: schema.Plan, domains: Sequence[DomainSummary]) -> str:
    training = plan.training
    apart = [domain.name for domain in domains if schema.trains_by_itself(domain.task, vision=plan.lora.vision)]
    steps = schema.head_training(training.steps, training.batch_size)
    heads = f"{steps} for each head that trains by itself ({', '.join(apart)})"
    if len(apart) == len(domains):
        return heads
    together = (
        ", all domains of an adapter at once"
        if plan.packing == "jointly"
        else f"; where a domain joins an adapter, {training.rehearsal:.0%} of each batch rehearses those in it"
    )
    text = f"{training.steps} steps of {training.batch_size} samples per domain{together}"
    return f"{text}; {heads}" if apart else text


def _sample_size(domain: DomainSummary, confidence: float | None) -> str:
    if confidence is None:
        return ""
    if domain.better == 0:
        return (
            f"an adapter as good as its teacher passes in at most {1 - confidence:.0%} of runs at a confidence of "
            f"{confidence:g} (warning: set `minus` above 0)"
        )
    count = domain.counts["validation"]
    most = "" if domain.threshold is not None else "at most "
    needs = f"more than {MOST}" if domain.needs is None else f"{most}{domain.needs}"
    exact = domain.metric in schema.MEANS - {"token_f1"}
    text = (
        f"needs {'' if exact else 'about '}{needs} validation samples at a confidence of {confidence:g}, so that an "
        f"adapter {domain.better:g} above the threshold passes in {POWER:.0%} of runs; there are {count}"
    )
    few = domain.needs is None or count < domain.needs
    return f"{text} (warning: too few, so a good adapter may be rejected)" if few else text


def _kind(lora: schema.LoraPlan) -> str:
    blocks, each = (f" in {lora.blocks} blocks", f"rank / {lora.blocks}") if lora.blocks > 1 else ("", "rank")
    kind = "activated, " if lora.activated else ""
    return f"{kind}rank {lora.rank}{blocks}, alpha {lora.alpha}{f' / sqrt({each})' if lora.rslora else ''}"


def _block(console: Console, title: str, rows: Mapping[str, str]) -> None:
    lines = [title, *(f"  {name:9} {text}" for name, text in rows.items() if text)]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _answered(domain: DomainSummary) -> str:
    if domain.head == schema.WORDS:
        return "the language model in words"
    head = f"{'an' if domain.head[0] in 'aeiou' else 'a'} {domain.head} head"
    return f"{head} (and in words; the report gives both accuracies)" if domain.also_in_words else head


def _domain(domain: schema.DomainPlan, plan: schema.Plan, data: DomainData) -> DomainSummary:
    splits = data.splits
    metric = domain.metric or schema.METRICS[splits.task][0]
    value = domain.threshold_before_training(data.teacher_score)
    better = domain.threshold.minus if isinstance(domain.threshold, schema.RelativeThreshold) else _BETTER
    shown = label_counts(splits)
    labels = () if splits.task == "regression" else splits.labels
    classes = {label: {name: of[number] for name, of in shown.items()} for number, label in enumerate(labels)}
    return DomainSummary(
        name=domain.name,
        task=domain.task or splits.task,
        real_or_synthetic="real" if splits.real else "synthetic",
        question=domain.question,
        head=domain.head or schema.HEADS[splits.task][0],
        metric=metric,
        threshold=value,
        rule=_threshold(domain, plan, data, metric, value),
        counts={name: len(part) for name, part in splits.parts.items()},
        needs=None if plan.confidence is None else samples_needed(value, better, plan.confidence),
        better=better,
        classes=classes,
        answers=len({str(sample.target) for sample in splits.train}),
        frames=splits.num_frames,
        teacher=None if data.teacher_result is None else dataclasses.asdict(data.teacher_result),
        also_in_words=schema.HEADS[splits.task][0] != schema.WORDS
        and any(answer_in_words(splits, sample) for sample in splits.train),
        notes=data.notes,
    )


def _threshold(domain: schema.DomainPlan, plan: schema.Plan, data: DomainData, metric: str, value: float | None) -> str:
    wanted = domain.threshold
    text = f"{metric} ({schema.METRIC_DESCRIPTIONS[metric]}) of at least "
    if value is not None:
        text += f"{value:.3f}"
    if isinstance(wanted, schema.RelativeThreshold) and value is None:
        text += f"the score of an adapter for this domain alone, minus {wanted.minus:g}"
    elif isinstance(wanted, schema.RelativeThreshold) and data.teacher_result is not None:
        text += f" (its teacher's {data.teacher_result.score:.3f} minus {wanted.minus:g})"
    return f"{text}, at a confidence of {plan.confidence:g}" if plan.confidence else text


def _shown(domain: DomainSummary) -> str:
    if not domain.classes:
        return f"{domain.answers} distinct answers in the training data"
    classes = [f"{label} {' / '.join(map(str, counts.values()))}" for label, counts in domain.classes.items()]
    more = len(classes) - _MAX_CLASSES
    return ", ".join(classes[:_MAX_CLASSES]) + (f" and {more} more" if more > 0 else "")


def _teacher(teacher: Mapping[str, object] | None) -> str:
    if teacher is None:
        return ""
    left = f"dropped for low confidence: {teacher['dropped']} samples, {teacher['dropped_boxes']} boxes"
    beyond = f"; {teacher['beyond']} answers outside the labels" if teacher["beyond"] else ""
    return f"{teacher['name']}: {teacher['score']:.3f} on validation data; {left}{beyond}"


def _time(plan: schema.Plan, estimate: Estimate) -> str:
    least, most = duration(estimate.at_least_s), duration(estimate.at_most_s)
    at_once = plan.packing in ("guided", "jointly")
    fits = f"if {'all domains fit into one' if at_once else 'every domain fits into the first'} adapter"
    text = f"about {least} {fits}, at most {most}" if least != most else f"about {least}"
    threads = "" if estimate.threads is None else f", {estimate.threads} thread{'s' * (estimate.threads > 1)}"
    measured = (
        f"{estimate.measured_steps} step{'s' * (estimate.measured_steps > 1)} of {estimate.measured_samples} samples"
    )
    return (
        f"{text}; estimated from {measured} measured on this machine ({estimate.device}{threads}): "
        f"{estimate.step_s:.2f} s per step of {estimate.batch_size}"
    )


def _disk(adapter_bytes: int, domains: Sequence[DomainSummary], estimate: Estimate) -> str:
    each = f"{adapter_bytes / 1e6:.1f} MB for each finished training"
    if not estimate.features_bytes:
        return each
    pictures = sum(domain.frames * sum(domain.counts.values()) for domain in domains)
    per_picture = f"{estimate.features_bytes / pictures / 1e3:.0f} kB a picture"
    return f"{estimate.features_bytes / 1e6:,.0f} MB for image features ({per_picture}; they stay in --out), and {each}"


def _expected(plan: schema.Plan, domain: DomainSummary) -> str:
    """What detection heads of the embedded model have reached with about as many training pictures."""
    if domain.head != "detection" or plan.base != "embedded":
        return ""
    count, (photos, of_photos) = domain.counts["train"], _F1_OF_PHOTOS
    reached = ", ".join(f"{score:.2f} from {number}" for number, score in _F1_OF_DRAWINGS.items())
    text = (
        f"F1 {of_photos:.2f} was measured with {photos} training pictures of one user's photographs; on rendered "
        f"streets {reached} (docs/decisions/0070); there are {count}"
    )
    likely = of_photos
    if domain.real_or_synthetic != "real":
        likely = max((score for number, score in _F1_OF_DRAWINGS.items() if number <= count), default=0.0)
    if domain.metric != "f1" or domain.threshold is None or domain.threshold <= likely:
        return text
    return (
        f"{text} (warning: the threshold is above that; let a detector label more pictures, with `format: "
        "unlabelled` and `teacher: {kind: onnx_detector}`, or serve a small detector itself: on rendered streets it "
        "reached 1.00 and this head 0.92, docs/decisions/0069)"
    )


def samples_needed(threshold: float | None, better: float, confidence: float) -> int | None:
    """The smallest number n of validation samples at which an adapter that is `better` above its threshold t passes
    with probability `POWER`; None above `MOST`.

    For a share of correct answers. Clopper and Pearson's lower bound of k correct answers among n reaches t exactly if
    P(Bin(n, t) >= k) <= 1 - confidence. With c(n) the smallest such k, the adapter passes with probability
    P(Bin(n, min(1, t + better)) >= c(n)).

    Args:
        threshold: None if it is unknown: then the one that needs most samples; t and t + better are near a half.
    """
    from scipy.stats import binom  # takes most of a second to import

    if threshold is None:
        threshold = 0.5 - better / 2
    numbers = np.arange(1, MOST + 1)
    below = binom.isf(1 - confidence, numbers, threshold)  # c(n) - 1
    passes = binom.sf(below, numbers, min(1.0, threshold + better)) >= POWER
    return int(numbers[passes.argmax()]) if passes.any() else None
