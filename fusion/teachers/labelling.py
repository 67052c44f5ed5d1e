"""The two uses of teachers: labelling unlabelled data, and setting an adapter's threshold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fusion.data.items import Item
from fusion.data.samples import Splits
from fusion.data.targets import default_labels, reader
from fusion.plan.mistakes import Mistakes
from fusion.plan.schema import BuiltInTeacher, DomainPlan, RelativeThreshold
from fusion.plan.tasks import WORDS
from fusion.progress.progress import Progress
from fusion.teachers import TEACHERS
from fusion.teachers.narrowing import Narrowed, narrowed
from fusion.teachers.opening import open_teacher
from fusion.teachers.protocol import Clip, Labelled, Teacher
from fusion.training.objectives import metric_of_some, task_of

_AT_ONCE = 32  # samples per call of a teacher, which are in memory


@dataclasses.dataclass(frozen=True)
class Teaching:
    """Result of labelling or comparing with a teacher.

    score: the domain's metric of its answers on validation data; 1 if the labels are its own. dropped, dropped_boxes:
    samples, and boxes of a detector, below the minimum confidence. beyond: samples, boxes and labels (multi_label) with
    an answer that is not a label of the domain.
    """

    name: str
    score: float
    dropped: int = 0
    dropped_boxes: int = 0
    beyond: int = 0


def threshold_before_training(domain: DomainPlan, taught: float | None) -> float | None:
    """The value of a domain's threshold; None if it is known only after training. taught: validation score of its
    teacher, if it has one."""
    if not isinstance(domain.threshold, RelativeThreshold):
        return domain.threshold
    if domain.threshold.relative_to == "teacher" and taught is not None:
        return taught - domain.threshold.minus
    return None


def label_by_teacher(
    domain: DomainPlan, task: str, items: Sequence[Item], mistakes: Mistakes, progress: Progress
) -> tuple[list[Item | None], Teaching] | None:
    """Label items with the domain's teacher.

    Returns:
        The labelled items and a summary. An item is None if the teacher's confidence is too low or its label is not in
        the plan. Returns None, after reporting a mistake, if the teacher fails.
    """
    assert domain.teacher is not None, "unlabelled data has a teacher"
    here = mistakes.inside("teacher")
    teacher = open_teacher(domain.teacher, task, here)
    said = None if teacher is None else _ask(domain, teacher, [item.frames for item in items], here, progress)
    if teacher is None or said is None:
        return None
    floor = domain.teacher.min_confidence
    sure = [one for one in said if one.confidence >= floor]
    if not sure:
        here.add(f"{floor:g} is above every confidence of the teacher: no sample is left", "min_confidence")
        return None
    within = _within(task, domain.labels or default_labels(task), sure, teacher, here)
    if within is None:
        return None
    answers = iter(within.answers)
    told = [next(answers) if one.confidence >= floor else None for one in said]
    kept = [
        None if answer is None else dataclasses.replace(item, answer=answer)
        for item, answer in zip(items, told, strict=True)
    ]
    if not any(kept):
        here.add("none of its answers is a label of the domain: no sample is left")
        return None
    boxes = sum(one.num_dropped for one in said)
    return kept, Teaching(teacher.name, 1.0, len(said) - len(sure), boxes, within.beyond)


def compare_with_teacher(domain: DomainPlan, splits: Splits, mistakes: Mistakes, progress: Progress) -> Teaching | None:
    """Score a teacher on labelled data. Returns None without a teacher or, after reporting a mistake, if it fails."""
    measure = isinstance(domain.threshold, RelativeThreshold) and domain.threshold.relative_to == "teacher"
    if domain.teacher is None and not measure:
        return None
    if domain.teacher is None or isinstance(domain.teacher, BuiltInTeacher):
        return _score_of_built_in(domain, splits, mistakes)
    samples = splits.validation
    here = mistakes.inside("teacher")
    teacher = open_teacher(domain.teacher, splits.task, here)
    said = None if teacher is None else _ask(domain, teacher, [sample.frames for sample in samples], here, progress)
    if teacher is None or said is None:
        return None
    within = _within(splits.task, splits.labels, said, teacher, here)
    if within is None:
        return None
    read = reader(splits.task, splits.labels)
    answers: list[object] = []
    for answer in within.answers:
        try:
            answers.append(None if answer is None else read(answer))
        except ValueError as error:
            here.add(str(error))
            return None
    return Teaching(teacher.name, _score(domain, splits, answers), beyond=within.beyond)


def _within(
    task: str, labels: tuple[str, ...], said: Sequence[Labelled], teacher: Teacher, mistakes: Mistakes
) -> Narrowed | None:
    try:
        return narrowed(task, labels, [one.answer for one in said], teacher.labels)
    except ValueError as error:
        mistakes.add(f"{teacher.name}: {error}")
        return None


def _score_of_built_in(domain: DomainPlan, splits: Splits, mistakes: Mistakes) -> Teaching | None:
    learner = TEACHERS.get(domain.source or "")
    if learner is None:
        field = "threshold" if domain.teacher is None else "teacher"
        mistakes.add(f"needs a `teacher`; only these sources have a built-in one: {', '.join(sorted(TEACHERS))}", field)
        return None
    model = learner()
    model.fit(splits)
    return Teaching(model.name, _score(domain, splits, model.answers(splits.validation)))


def _score(domain: DomainPlan, splits: Splits, answers: Sequence[object]) -> float:
    """The adapter's metric of a teacher's answers; if the adapter answers in words, the answers are compared as words.
    An answer of None counts as wrong."""
    if domain.head == WORDS and splits.labels:
        answers = [splits.labels[answer] if isinstance(answer, int) else answer for answer in answers]
        splits = splits.in_words()
    return metric_of_some(task_of(splits, domain.metric), answers, [sample.target for sample in splits.validation])


def _ask(
    domain: DomainPlan, teacher: Teacher, clips: Sequence[Clip], mistakes: Mistakes, progress: Progress
) -> list[Labelled] | None:
    said: list[Labelled] = []
    with progress.work(f"asking {teacher.name} about {domain.name}", len(clips), "samples") as moved:
        for first in range(0, len(clips), _AT_ONCE):
            part = [list(clip) for clip in clips[first : first + _AT_ONCE]]
            try:
                said += teacher.label(part)
            except Exception as error:  # foreign code may raise any exception
                mistakes.add(f"{teacher.name} fails: {type(error).__name__}: {error}")
                return None
            moved(len(said))
    return said
