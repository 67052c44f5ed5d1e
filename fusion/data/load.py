"""From a plan's domains to samples in three parts; all mistakes in the data are reported together."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fusion.data.coco import read_coco
from fusion.data.folders import read_images, read_unlabelled, read_videos
from fusion.data.frames import Seen
from fusion.data.items import PARTS, Item, Part
from fusion.data.refs import EXPRESSION, read_references
from fusion.data.samples import Sample, Splits, held_back
from fusion.data.split import clusters_of, split
from fusion.data.tables import read_labelled_videos, read_questions
from fusion.data.targets import labels_shown, targets_of
from fusion.data.verify import check_parts, verified
from fusion.plan.mistakes import Mistakes
from fusion.plan.schema import (
    Coco,
    DataPlan,
    DomainPlan,
    ImageFolder,
    Plan,
    Questions,
    References,
    Unlabelled,
    VideoFolder,
)
from fusion.plan.tasks import HEADS, LEAST_LABELS, METRICS, WORDS
from fusion.progress.progress import Progress
from fusion.synthetic.sources import BUILT_IN, load_source
from fusion.teachers.labelling import Teaching, compare_with_teacher, label_by_teacher, threshold_before_training
from fusion.training.text_metrics import box_of_words

# Tasks that each data format supports; the first is the default. A teacher can answer any task, so `unlabelled` has no
# default.
_TASKS: dict[str, tuple[str, ...]] = {
    "image_folder": ("classification", "binary", "counting"),
    "coco": ("detection", "multi_label", "counting", "captioning"),
    "video_folder": ("action", "classification", "binary", "counting"),
    "questions": (
        *("vqa", "captioning", "referring", "classification", "binary", "counting", "multi_label", "regression"),
    ),
    "references": ("referring",),
    "unlabelled": (
        *("classification", "binary", "counting", "action", "multi_label", "detection", "captioning", "regression"),
    ),
}


@dataclasses.dataclass(frozen=True)
class DomainData:
    """A domain ready for training. teaching: None without a teacher."""

    splits: Splits
    teaching: Teaching | None = None

    @property
    def taught(self) -> float | None:
        """Its teacher's validation score."""
        return None if self.teaching is None else self.teaching.score


def load_domains(plan: Plan, mistakes: Mistakes, progress: Progress | None = None) -> dict[str, DomainData]:
    """Read, check and split every domain's data.

    Args:
        mistakes: receives every mistake found.
        progress: display for reading pictures and labelling by teachers.

    Returns:
        The data by domain name, without domains that have no samples because of mistakes.
    """
    progress = progress or Progress()
    loaded: dict[str, DomainData] = {}
    for place, domain in enumerate(plan.domains):
        data = _load(domain, plan, mistakes.inside("domains", place), progress)
        if data is not None:
            loaded[domain.name] = data
    return loaded


def _load(domain: DomainPlan, plan: Plan, mistakes: Mistakes, progress: Progress) -> DomainData | None:
    if domain.source in BUILT_IN:
        splits = _built_in(domain, plan.seed, mistakes)
        data = None if splits is None else DomainData(splits)
    else:
        data = _own(domain, plan.seed, mistakes, progress)
    if data is None:
        return None
    if data.teaching is None and not mistakes:
        data = dataclasses.replace(data, teaching=compare_with_teacher(domain, data.splits, mistakes, progress))
    _can_be_kept(domain, plan, data, mistakes)
    if domain.metric == "overlap":
        _are_boxes(data.splits, mistakes)
    if plan.training.patience is not None and not held_back(data.splits.train):
        mistakes.add(
            f"`training.patience` needs a tenth of the training samples held back, but none of these "
            f"{len(data.splits.train)} can be held back without splitting a group; add data, or remove patience"
        )
    in_words = domain.head == WORDS and data.splits.labels
    return dataclasses.replace(data, splits=data.splits.in_words()) if in_words else data


def _built_in(domain: DomainPlan, seed: int, mistakes: Mistakes) -> Splits | None:
    assert domain.source is not None
    if domain.labels is not None:
        mistakes.add(f"source {domain.source!r} has its own labels; remove them", "labels")
    try:
        splits = load_source(domain.source, seed)
    except ImportError as error:
        mistakes.add(f"{domain.source!r} needs {error.name}; install it with pip install 'vlora[demo]'", "source")
        return None
    if domain.task not in (None, splits.task):
        mistakes.add(f"is {domain.task!r}, but {domain.source!r} is for {splits.task!r}; remove the task", "task")
        return None
    _fit(domain, splits.task, mistakes)
    return splits


def _own(domain: DomainPlan, seed: int, mistakes: Mistakes, progress: Progress) -> DomainData | None:
    """Load user data."""
    data, here = domain.data, mistakes.inside("data")
    if data is None:
        assert domain.source is not None
        if not os.path.isdir(domain.source):
            known = ", ".join(sorted(BUILT_IN))
            mistakes.add(f"{domain.source!r} is neither a folder nor built in ({known})", "source")
            return None
        data = ImageFolder(format="image_folder", path=Path(domain.source))
        here = mistakes.inside("source", whole=True)
    task = _task_for(domain, data.format, mistakes)
    if task is None:
        return None
    _fit(domain, task, mistakes)
    if isinstance(data, References):
        _fit_references(domain, mistakes)
    try:
        items = _read(data, task, domain, here)
    except OSError as error:
        here.add(f"{error.filename} cannot be read: {error.strerror}", "path")
        return None
    seen = verified(items, here, progress, domain.name)
    if here:
        return None
    teaching = None
    if isinstance(data, Unlabelled):
        taught = label_by_teacher(domain, task, items, mistakes, progress)
        if taught is None:
            return None
        labelled, teaching = taught
        kept = [(item, one) for item, one in zip(labelled, seen, strict=True) if item is not None]
        items, seen = [item for item, _ in kept], [one for _, one in kept]
    splits = _cut(domain, data, task, items, seen, seed, here)
    return None if here else DomainData(splits, teaching)


def _task_for(domain: DomainPlan, form: str, mistakes: Mistakes) -> str | None:
    known = _TASKS[form]
    if domain.task is None and form == "unlabelled":
        mistakes.add(f"has no `task`; choose the task of the teacher's labels: {', '.join(known)}")
        return None
    task = domain.task or known[0]
    if task not in known:
        mistakes.add(f"is {task!r}; data of the format {form!r} supports {', '.join(known)}", "task")
        return None
    return task


def _fit(domain: DomainPlan, task: str, mistakes: Mistakes) -> None:
    """Check that metric, head and labels match the task."""
    known = METRICS["vqa" if domain.head == WORDS else task]
    if domain.metric == "mae":
        mistakes.add(f"'mae' is an error; a threshold needs a score from 0 to 1: {', '.join(known)}", "metric")
    elif domain.metric is not None and domain.metric not in known:
        answered = "in words" if WORDS in (domain.head, HEADS[task][0]) else "by a head"
        mistakes.add(f"is {domain.metric!r}; {task} {answered} supports {', '.join(known)}", "metric")
    if domain.head is not None and domain.head not in HEADS[task]:
        mistakes.add(f"is {domain.head!r}; the task {task!r} is answered by {', '.join(HEADS[task])}", "head")
    if domain.labels is not None and (task == "regression" or HEADS[task][0] == WORDS):
        mistakes.add(f"{task} takes no labels; remove them", "labels")
    elif domain.labels is not None and task == "binary" and len(domain.labels) != 2:
        mistakes.add(f"are {list(domain.labels)}; binary takes two labels: negative, then positive", "labels")
    elif domain.labels is not None and len(domain.labels) < LEAST_LABELS[task]:
        mistakes.add(f"are {list(domain.labels)}; {task} needs {LEAST_LABELS[task]} or more", "labels")


def _fit_references(domain: DomainPlan, mistakes: Mistakes) -> None:
    """Check that the question has a place for the expression, and that the metric compares boxes."""
    if EXPRESSION not in domain.question:
        mistakes.add(
            f"must contain {EXPRESSION} in place of the expression, for example: where is {EXPRESSION} ?", "question"
        )
    if domain.metric is None:
        mistakes.add("has no `metric`; expressions are answered with boxes, so use `overlap`")


def _are_boxes(splits: Splits, mistakes: Mistakes) -> None:
    targets = [str(sample.target) for part in splits.parts.values() for sample in part]
    if other := next((target for target in targets if box_of_words(target) is None), None):
        mistakes.add(
            f"is 'overlap', but the answer {other!r} is not a box in thousandths ([0, 250, 500, 1000])", "metric"
        )


def _can_be_kept(domain: DomainPlan, plan: Plan, data: DomainData, mistakes: Mistakes) -> None:
    """Refuse a threshold of 0 or less, and one above the best lower bound (Clopper and Pearson) that the number of
    validation samples allows."""
    threshold = threshold_before_training(domain, data.taught)
    if threshold is None:
        return
    if threshold <= 0:
        mistakes.add(f"comes to {threshold:.3f}, which every adapter meets", "threshold")
    if plan.confidence is None:
        return
    count = len(data.splits.validation)
    best = (1 - plan.confidence) ** (1 / count)
    if threshold > best:
        mistakes.add(
            f"{threshold:g} cannot be reached: with {count} validation samples, all correct, the lower bound is "
            f"{best:.3f} at a confidence of {plan.confidence:g}; lower the threshold, or add data",
            "threshold",
        )


def _read(data: DataPlan, task: str, domain: DomainPlan, mistakes: Mistakes) -> list[Item]:
    match data:
        case ImageFolder():
            return read_images(data, mistakes)
        case Coco():
            return read_coco(data, task, mistakes)
        case VideoFolder():
            return read_videos(data, mistakes) if data.labels is None else read_labelled_videos(data, mistakes)
        case Questions():
            return read_questions(data, task == "multi_label", mistakes)
        case References():
            return read_references(data, domain.question, mistakes)
        case Unlabelled():
            return read_unlabelled(data, mistakes)


def _cut(
    domain: DomainPlan,
    data: DataPlan,
    task: str,
    items: Sequence[Item],
    seen: Sequence[Seen],
    seed: int,
    mistakes: Mistakes,
) -> Splits:
    labels, targets = targets_of(task, items, domain.labels, mistakes)
    whole = [(item, one, t) for item, one, t in zip(items, seen, targets, strict=True) if t is not None]
    told = Counter(item.part for item in items)
    if 0 < told[None] < len(items):
        mistakes.add(f"{told[None]} of {len(items)} samples have no split; set it for all samples or for none", "path")
    if items and not told[None] and "split" in data.model_fields_set:
        mistakes.add("the data defines its own parts; remove this field", "split")
    parts: Sequence[Part | None] = [item.part for item, _, _ in whole]
    # Files with the same bytes form one group, whatever their paths.
    clusters = clusters_of([[one.digest, item.group] if item.group else [one.digest] for item, one, _ in whole])
    if told[None]:
        parts = split([labels_shown(task, target) for _, _, target in whole], clusters, data.split, seed)
    samples: dict[Part, list[Sample]] = {part: [] for part in PARTS}
    # Files are ordered by label; see `Splits`.
    for place in np.random.default_rng(seed).permutation(len(whole)):
        (item, _, target), part = whole[place], parts[place]
        if part is not None:
            samples[part].append(Sample(item.frames, target, item.question, str(clusters[place])))
    splits = Splits(task, labels, samples["train"], samples["validation"], samples["test"], real=True)
    if not mistakes:
        check_parts(splits, mistakes)
    return splits
