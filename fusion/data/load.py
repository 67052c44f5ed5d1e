"""From a plan's domains to samples in three parts; all errors in the data are reported together."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fusion.data.coco import EXPRESSION, read_coco, read_references
from fusion.data.folders import read_labelled, read_unlabelled
from fusion.data.frames import Clip, FileInfo, Frames
from fusion.data.samples import Item, Sample, Splits, held_back
from fusion.data.split import clusters_of, divide
from fusion.data.tables import read_labelled_videos, read_questions
from fusion.data.targets import label_counts, targets_of
from fusion.data.voc import read_voc
from fusion.data.yolo import read_yolo
from fusion.plan import data_formats
from fusion.plan.schema import HEADS, METRICS, MIN_LABELS, WORDS, DomainPlan, Plan, RelativeThreshold, trains_by_itself
from fusion.progress import Progress
from fusion.teachers import TeacherResult
from fusion.training.text_metrics import box_of_words
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import PARTS, Part

if TYPE_CHECKING:
    from fusion.synthetic.sources import Source

# Tasks that each data format supports; the first is the default. A teacher can answer any task, so `unlabelled` has no
# default.
_TASKS: dict[str, tuple[str, ...]] = {
    "image_folder": ("classification", "binary", "counting"),
    "coco": ("detection", "multi_label", "counting", "captioning"),
    "yolo": ("detection", "multi_label", "counting"),
    "voc": ("detection", "multi_label", "counting"),
    "video_folder": ("action", "classification", "binary", "counting"),
    "questions": (
        *("vqa", "captioning", "referring", "classification", "binary", "counting", "multi_label", "regression"),
    ),
    "references": ("referring",),
    "unlabelled": (
        *("classification", "binary", "counting", "action", "multi_label", "detection", "captioning", "regression"),
    ),
}

_ONE_ANSWER = ("classification", "binary", "counting", "regression")
_SHOWS_LABELS = ("classification", "binary", "action", "multi_label", "detection")  # every part needs every label


@dataclasses.dataclass(frozen=True)
class DomainData:
    """A domain ready for training.

    teacher_result: None without a teacher. notes: what reading the data did that its author may not expect. digests: of
    each part's pictures in user data.
    """

    splits: Splits
    teacher_result: TeacherResult | None = None
    notes: tuple[str, ...] = ()
    digests: Mapping[Part, frozenset[str]] = dataclasses.field(default_factory=dict)

    @property
    def teacher_score(self) -> float | None:
        return None if self.teacher_result is None else self.teacher_result.score


def load_domains(plan: Plan, errors: PlanErrors, progress: Progress | None = None) -> dict[str, DomainData]:
    """Read, check and split every domain's data.

    Returns:
        The data by domain name, without domains that have no samples because of errors.
    """
    progress = progress or Progress()
    loaded: dict[str, DomainData] = {}
    for place, domain in enumerate(plan.domains):
        data = _load(domain, plan, errors.inside("domains", place), progress)
        if data is not None:
            loaded[domain.name] = data
    beside = [name for name, own in loaded.items() if not trains_by_itself(own.splits.task, vision=plan.lora.vision)]
    for name, other in itertools.permutations(beside, 2):
        if leak := _leak(loaded[name], other, loaded[other].digests):
            loaded[name] = dataclasses.replace(loaded[name], notes=(*loaded[name].notes, leak))
    return loaded


def _leak(data: DomainData, other: str, digests: Mapping[Part, frozenset[str]]) -> str:
    """Pictures of validation and test that another domain trains on: an adapter that holds both is scored on them."""
    shared = {part: len(own & digests.get("train", frozenset())) for part, own in data.digests.items()}
    found = [f"{shared[part]} of {len(data.digests[part])} {part}" for part in PARTS[1:] if shared.get(part)]
    if not found:
        return ""
    return (
        f"warning: {' and '.join(found)} pictures are training pictures of {other}, so an adapter for both is scored "
        "on pictures that it was trained on; give equal pictures one part in both, by folders or a `split` column"
    )


def _load(domain: DomainPlan, plan: Plan, errors: PlanErrors, progress: Progress) -> DomainData | None:
    _check_margin(domain, plan, errors)
    if domain.source is not None and domain.source in _built_in():
        splits = _load_built_in(domain, plan.seed, errors)
        data = None if splits is None else DomainData(splits)
    else:
        data = _load_user_data(domain, plan.seed, errors, progress)
    if data is None:
        return None
    asks_teacher = domain.teacher is not None or (
        isinstance(domain.threshold, RelativeThreshold) and domain.threshold.relative_to == "teacher"
    )
    if data.teacher_result is None and asks_teacher and not errors:
        from fusion.teachers.labelling import compare_with_teacher  # with all kinds of teachers

        data = dataclasses.replace(data, teacher_result=compare_with_teacher(domain, data.splits, errors, progress))
    _check_threshold(domain, plan, data, errors)
    targets = itertools.chain.from_iterable(data.splits.parts.values()) if domain.metric == "overlap" else ()
    if other := next((one.target for one in targets if box_of_words(str(one.target)) is None), None):
        errors.add(
            f"is 'overlap', but the answer {other!r} is not a box in thousandths ([0, 250, 500, 1000])", "metric"
        )
    if plan.training.patience is not None and not held_back(data.splits.train):
        errors.add(
            f"`training.patience` needs a tenth of the training samples held back, but none of these "
            f"{len(data.splits.train)} can be held back without splitting a group; add data, or remove patience"
        )
    in_words = domain.head == WORDS and WORDS in HEADS[data.splits.task] and data.splits.labels
    return dataclasses.replace(data, splits=data.splits.in_words()) if in_words else data


def _built_in() -> dict[str, Source]:
    from fusion.synthetic.sources import BUILT_IN  # with all that is drawn, for plans that name a source

    return BUILT_IN


def _load_built_in(domain: DomainPlan, seed: int, errors: PlanErrors) -> Splits | None:
    assert domain.source is not None
    if domain.labels is not None:
        errors.add(f"source {domain.source!r} has its own labels; remove them", "labels")
    try:
        splits = _built_in()[domain.source](seed)
    except ImportError as error:
        errors.add(f"{domain.source!r} needs {error.name}; install it with pip install 'vlora[demo]'", "source")
        return None
    if domain.task not in (None, splits.task):
        errors.add(f"is {domain.task!r}, but {domain.source!r} is for {splits.task!r}; remove the task", "task")
        return None
    _check_fields(domain, splits.task, errors)
    return splits


def _load_user_data(domain: DomainPlan, seed: int, errors: PlanErrors, progress: Progress) -> DomainData | None:
    data, here = domain.data, errors.inside("data")
    at_path = here.inside("path")
    if data is None:
        assert domain.source is not None
        if not os.path.isdir(domain.source):
            known = ", ".join(sorted(_built_in()))
            errors.add(f"{domain.source!r} is neither a folder nor built in ({known})", "source")
            return None
        data = data_formats.ImageFolder(format="image_folder", path=Path(domain.source))
        here = at_path = errors.inside("source", whole=True)
    task = _find_task(domain, data.format, errors)
    if task is None:
        return None
    _check_fields(domain, task, errors)
    if isinstance(data, data_formats.References):
        _check_references(domain, errors)
    try:
        items = _read(data, task, domain, here, at_path)
    except OSError as error:
        at_path.add(f"{error.filename} cannot be read: {error.strerror}")
        return None
    parts = {item.part for item in items}
    if parts and not parts & {None, "train"}:
        at_path.add(f"the data has samples of {' and '.join(sorted(map(str, parts)))}, but none of train")
    if (domain.head or HEADS[task][0]) != WORDS:
        _check_questions(domain, task, items, at_path)
    seen = verify_items(items, at_path, progress, domain.name)
    if here:
        return None
    teacher_result = None
    if isinstance(data, data_formats.Unlabelled):
        from fusion.teachers.labelling import label_by_teacher

        labelling = label_by_teacher(domain, task, items, errors, progress)
        if labelling is None:
            return None
        labelled, teacher_result = labelling
        kept = [(item, one) for item, one in zip(labelled, seen, strict=True) if item is not None]
        items, seen = [item for item, _ in kept], [one for _, one in kept]
    splits, digests = _split_samples(domain, data, task, items, seen, seed, here, at_path)
    notes = tuple(dict.fromkeys((*at_path.notes, *here.notes)))
    return None if here else DomainData(splits, teacher_result, notes, digests)


def _find_task(domain: DomainPlan, form: str, errors: PlanErrors) -> str | None:
    known = _TASKS[form]
    if domain.task is None and form == "unlabelled":
        errors.add(f"has no `task`; choose the task of the teacher's labels: {', '.join(known)}")
        return None
    task = domain.task or known[0]
    if task not in known:
        errors.add(f"is {task!r}; data of the format {form!r} supports {', '.join(known)}", "task")
        return None
    return task


def _check_fields(domain: DomainPlan, task: str, errors: PlanErrors) -> None:
    known = METRICS["vqa" if domain.head == WORDS else task]
    if domain.metric == "mae":
        errors.add(f"'mae' is an error; a threshold needs a score from 0 to 1: {', '.join(known)}", "metric")
    elif domain.metric is not None and domain.metric not in known:
        answered = "in words" if WORDS in (domain.head, HEADS[task][0]) else "by a head"
        errors.add(f"is {domain.metric!r}; {task} {answered} supports {', '.join(known)}", "metric")
    if domain.head is not None and domain.head not in HEADS[task]:
        errors.add(f"is {domain.head!r}; the task {task!r} is answered by {', '.join(HEADS[task])}", "head")
    if domain.labels is not None and (task == "regression" or HEADS[task][0] == WORDS):
        errors.add(f"{task} takes no labels; remove them", "labels")
    elif domain.labels is not None and task == "binary" and len(domain.labels) != 2:
        errors.add(f"are {list(domain.labels)}; binary takes two labels: negative, then positive", "labels")
    elif domain.labels is not None and len(domain.labels) < MIN_LABELS[task]:
        errors.add(f"are {list(domain.labels)}; {task} needs {MIN_LABELS[task]} or more", "labels")


def _check_references(domain: DomainPlan, errors: PlanErrors) -> None:
    if EXPRESSION not in domain.question:
        errors.add(
            f"must contain {EXPRESSION} in place of the expression, for example: where is {EXPRESSION} ?", "question"
        )
    if domain.metric is None:
        errors.add("has no `metric`; expressions are answered with boxes, so use `overlap`")


def _check_questions(domain: DomainPlan, task: str, items: Sequence[Item], errors: PlanErrors) -> None:
    """Refuse questions of samples that differ from the domain's, the only one that a served head is asked."""
    words = f"`head: {WORDS}`, " if WORDS in HEADS[task] else ""
    for item in items:
        if item.question not in ("", domain.question):
            errors.add(
                f"{item.place}: the question {item.question!r} is not the domain's {domain.question!r}, which a head "
                f"always answers; use {words}task vqa, or one domain per question"
            )


def _check_margin(domain: DomainPlan, plan: Plan, errors: PlanErrors) -> None:
    """Refuse a threshold that is the score alone, if the lower bound of that score has to meet it."""
    threshold = domain.threshold
    if plan.confidence is None or not isinstance(threshold, RelativeThreshold):
        return
    if threshold.relative_to == "alone" and threshold.minus == 0:
        errors.add(
            f"is the score alone with `minus: 0`, which the lower bound of that score at a confidence of "
            f"{plan.confidence:g} cannot reach; set `minus` above 0, or `confidence: null`",
            "threshold",
        )


def _check_threshold(domain: DomainPlan, plan: Plan, data: DomainData, errors: PlanErrors) -> None:
    """Refuse a threshold of 0 or less, and one above the best lower bound (Clopper and Pearson) that the number of
    validation samples allows."""
    threshold = domain.threshold_before_training(data.teacher_score)
    if threshold is None:
        return
    if threshold <= 0:
        errors.add(f"comes to {threshold:.3f}, which every adapter meets", "threshold")
    if plan.confidence is None:
        return
    count = len(data.splits.validation)
    best = (1 - plan.confidence) ** (1 / count)
    if threshold > best:
        errors.add(
            f"{threshold:g} cannot be reached: with {count} validation samples, all correct, the lower bound is "
            f"{best:.3f} at a confidence of {plan.confidence:g}; lower the threshold, add data, or set "
            "`confidence: null`",
            "threshold",
        )


def _read(
    data: data_formats.DataPlan, task: str, domain: DomainPlan, errors: PlanErrors, at_path: PlanErrors
) -> list[Item]:
    """errors: of `data`. at_path: of its path."""
    match data:
        case data_formats.ImageFolder():
            return read_labelled(data, at_path)
        case data_formats.Coco():
            return read_coco(data, task, at_path)
        case data_formats.Yolo():
            return read_yolo(data, task, at_path)
        case data_formats.Voc():
            return read_voc(data, task, at_path)
        case data_formats.VideoFolder():
            return read_labelled(data, at_path) if data.labels is None else read_labelled_videos(data, errors)
        case data_formats.Questions():
            return read_questions(data, task == "multi_label", errors)
        case data_formats.References():
            return read_references(data, domain.question, errors)
        case data_formats.Unlabelled():
            return read_unlabelled(data, at_path)


def _split_samples(
    domain: DomainPlan,
    data: data_formats.DataPlan,
    task: str,
    items: Sequence[Item],
    seen: Sequence[FileInfo],
    seed: int,
    errors: PlanErrors,
    at_path: PlanErrors,
) -> tuple[Splits, dict[Part, frozenset[str]]]:
    labels, targets = targets_of(task, items, domain.labels, errors)
    whole = [(item, one, t) for item, one, t in zip(items, seen, targets, strict=True) if t is not None]
    if task in _ONE_ANSWER:
        _note_contradictions([(one.digest, item) for item, one, _ in whole], errors)
    parts_given = Counter(item.part for item in items)
    if 0 < parts_given[None] < len(items):
        at_path.add(f"{parts_given[None]} of {len(items)} samples have no split; set it for all samples or for none")
    if items and all(parts_given[part] for part in PARTS) and "split" in data.model_fields_set:
        errors.add("the data defines its own parts; remove this field", "split")
    # Equal pictures form one group, whatever their paths.
    clusters = clusters_of([[one.digest, item.group] if item.group else [one.digest] for item, one, _ in whole])
    labelled = [(item.part, target) for item, _, target in whole]
    parts = divide(task, labelled, clusters, data.split, seed, errors)
    samples: dict[Part, list[Sample]] = {part: [] for part in PARTS}
    # Files are ordered by label; see `Splits`.
    for place in np.random.default_rng(seed).permutation(len(whole)):
        (item, _, target), part = whole[place], parts[place]
        if part is not None:
            samples[part].append(Sample(item.frames, target, item.question, str(clusters[place])))
    splits = Splits(task, labels, samples["train"], samples["validation"], samples["test"], real=True)
    if not errors:
        check_parts(splits, at_path)
    digests = {
        part: frozenset(one.digest for (_, one, _), own in zip(whole, parts, strict=True) if own == part)
        for part in PARTS
    }
    return splits, digests


def _note_contradictions(seen: Sequence[tuple[str, Item]], errors: PlanErrors) -> None:
    first: dict[tuple[object, ...], Item] = {}
    others = []
    for digest, item in seen:
        span = (item.frames.start_s, item.frames.end_s) if isinstance(item.frames, Clip) else ()
        if first.setdefault((digest, *span, item.question), item).answer != item.answer:
            others.append(item)
    if others:
        errors.note(
            f"warning: {len(others)} samples contradict an earlier one of the same picture, the first at "
            f"{others[0].place}; for several labels of a picture use task multi_label, for boxes coco, yolo or voc"
        )


# Data checks: unreadable files, one picture in two parts, empty parts, and labels missing from a part.


def verify_items(items: Sequence[Item], errors: PlanErrors, progress: Progress, name: str) -> list[FileInfo]:
    """Decode every file once, and report pictures that occur in two parts. name: the domain's name."""
    different = list(dict.fromkeys(item.frames for item in items))  # a picture may have many questions
    found: dict[Frames, FileInfo | str] = {}
    with (
        ThreadPoolExecutor() as pool,
        progress.work(f"checking the files of {name}", len(different), "files") as update,
    ):
        for frames, one in zip(different, pool.map(_verify_file, different), strict=True):
            found[frames] = one
            update(len(found))
    files: list[FileInfo] = []
    first: dict[str, Item] = {}
    reported: set[tuple[str, Path]] = set()
    for why in found.values():
        if isinstance(why, str):
            errors.add(why)
    for item in items:
        one = found[item.frames]
        if isinstance(one, str):
            continue
        files.append(one)
        if item.size not in (None, one.size):
            errors.add(f"{item.place} has size {item.size}, but {item.frames.file} has {one.size}")
        before = first.setdefault(one.digest, item)
        pair = (one.digest, item.frames.file)
        if before.part != item.part and pair not in reported:
            reported.add(pair)
            same = (
                "is also in" if before.frames.file == item.frames.file else f"is identical to {before.frames.file} in"
            )
            errors.add(f"{item.frames.file} in {item.part} {same} {before.part}; parts must not share a picture")
    return files


def _verify_file(frames: Frames) -> FileInfo | str:
    try:
        return frames.verify()
    except ValueError as error:
        return str(error)


def check_parts(splits: Splits, errors: PlanErrors) -> None:
    for name, part in splits.parts.items():
        if not part:
            errors.add(f"{name} is empty")
    if errors or splits.task not in _SHOWS_LABELS:
        return
    shown = label_counts(splits)
    for number, label in enumerate(splits.labels):
        missing = [name for name, counts in shown.items() if not counts[number]]
        if missing:
            there = ", ".join(f"{counts[number]} in {name}" for name, counts in shown.items() if counts[number])
            errors.add(
                f"the label {label!r} is missing from {' and '.join(missing)}: {there or 'none anywhere'}; add some, "
                "or remove the label"
            )
