"""The two uses of teachers: labelling unlabelled data, and setting an adapter's threshold."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fusion.data.samples import Answer, Item, NamedBox, Splits
from fusion.data.targets import default_labels, reader
from fusion.plan.schema import WORDS, DomainPlan
from fusion.plan.teacher_kinds import BuiltInTeacher
from fusion.progress import Progress
from fusion.teachers import Clip, Labelled, Teacher, TeacherResult, few
from fusion.teachers.built_in import TEACHERS
from fusion.teachers.opening import open_teacher
from fusion.training.objectives import metric_of_some, objective_of
from vlora.plan_files.errors import PlanErrors

_AT_ONCE = 32  # samples per call of a teacher, which are in memory

_NAMED = ("classification", "action", "binary", "multi_label", "detection")  # answered by label names


def label_by_teacher(
    domain: DomainPlan, task: str, items: Sequence[Item], errors: PlanErrors, progress: Progress
) -> tuple[list[Item | None], TeacherResult] | None:
    """Label items with the domain's teacher.

    Returns:
        The labelled items and a summary. An item is None if the teacher's confidence is too low or its label is not in
        the plan. Returns None, after reporting an error, if the teacher fails.
    """
    assert domain.teacher is not None, "unlabelled data has a teacher"
    here = errors.inside("teacher")
    if (asked := _ask(domain, task, [item.frames for item in items], here, progress)) is None:
        return None
    teacher, labelled = asked
    floor = domain.teacher.min_confidence
    sure = [one for one in labelled if one.confidence >= floor]
    if not sure:
        here.add(f"{floor:g} is above every confidence of the teacher: no sample is left", "min_confidence")
        return None
    within = _within(task, domain.labels or default_labels(task), sure, teacher, here)
    if within is None:
        return None
    answers = iter(within.answers)
    confident = [next(answers) if one.confidence >= floor else None for one in labelled]
    kept = [
        None if answer is None else dataclasses.replace(item, answer=answer)
        for item, answer in zip(items, confident, strict=True)
    ]
    if not any(kept):
        here.add("none of its answers is a label of the domain: no sample is left")
        return None
    boxes = sum(one.num_dropped for one in labelled)
    return kept, TeacherResult(teacher.name, 1.0, len(labelled) - len(sure), boxes, within.beyond)


def compare_with_teacher(
    domain: DomainPlan, splits: Splits, errors: PlanErrors, progress: Progress
) -> TeacherResult | None:
    """Score a domain's teacher on labelled data, or the built-in one of its source.

    Returns None, after reporting an error, if it fails.
    """
    if domain.teacher is None or isinstance(domain.teacher, BuiltInTeacher):
        return _score_of_built_in(domain, splits, errors)
    here = errors.inside("teacher")
    clips = [sample.frames for sample in splits.validation]
    if (asked := _ask(domain, splits.task, clips, here, progress)) is None:
        return None
    teacher, labelled = asked
    within = _within(splits.task, splits.labels, labelled, teacher, here)
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
    return TeacherResult(teacher.name, _score(domain, splits, answers), beyond=within.beyond)


def _within(
    task: str, labels: tuple[str, ...], labelled: Sequence[Labelled], teacher: Teacher, errors: PlanErrors
) -> RestrictedAnswers | None:
    try:
        return restrict_answers(task, labels, [one.answer for one in labelled], teacher.labels)
    except ValueError as error:
        errors.add(f"{teacher.name}: {error}")
        return None


def _score_of_built_in(domain: DomainPlan, splits: Splits, errors: PlanErrors) -> TeacherResult | None:
    learner = TEACHERS.get(domain.source or "")
    if learner is None:
        field = "threshold" if domain.teacher is None else "teacher"
        errors.add(f"needs a `teacher`; only these sources have a built-in one: {', '.join(sorted(TEACHERS))}", field)
        return None
    model = learner(splits)
    return TeacherResult(model.name, _score(domain, splits, model.answers(splits.validation)))


def _score(domain: DomainPlan, splits: Splits, answers: Sequence[object]) -> float:
    """The adapter's metric of a teacher's answers; if the adapter answers in words, the answers are compared as words.
    An answer of None counts as wrong."""
    if domain.head == WORDS and splits.labels:
        answers = [splits.labels[answer] if isinstance(answer, int) else answer for answer in answers]
        splits = splits.in_words()
    return metric_of_some(objective_of(splits, domain.metric), answers, [sample.target for sample in splits.validation])


def _ask(
    domain: DomainPlan, task: str, clips: Sequence[Clip], errors: PlanErrors, progress: Progress
) -> tuple[Teacher, list[Labelled]] | None:
    """The domain's teacher with an answer for each clip. Returns None, after reporting an error, if it fails."""
    assert domain.teacher is not None, "the caller checks it"
    if (teacher := open_teacher(domain.teacher, task, errors)) is None:
        return None
    labelled: list[Labelled] = []
    with progress.work(f"asking {teacher.name} about {domain.name}", len(clips), "samples") as update:
        for first in range(0, len(clips), _AT_ONCE):
            part = [list(clip) for clip in clips[first : first + _AT_ONCE]]
            try:
                labelled += teacher.label(part)
            except Exception as error:  # foreign code may raise any exception
                errors.add(f"{teacher.name} fails: {type(error).__name__}: {error}")
                return None
            update(len(labelled))
    return teacher, labelled


# Teachers with more labels than a domain, for example a thousand classes: handling of the other labels.


class RestrictedAnswers(NamedTuple):
    """answers: the teacher's answers, without boxes and multi_label labels that the domain does not have; None for a
    single such label. beyond: number of labels outside the domain's."""

    answers: list[Answer | None]
    beyond: int


def restrict_answers(
    task: str, labels: tuple[str, ...], answers: Sequence[Answer], knows: Sequence[str]
) -> RestrictedAnswers:
    """Restrict a teacher's answers to the domain's labels.

    Args:
        knows: all labels of the teacher; if empty, the labels in `answers` are used.

    Raises:
        ValueError: the teacher gives other labels and lacks one of the domain's. The two then probably use different
            names for one class, and dropping these answers would make the teacher look wrong.
    """
    if task not in _NAMED or not labels:
        return RestrictedAnswers(list(answers), 0)
    number = _number("binary" if task == "binary" else "classification", labels)
    names = Counter(name for answer in answers for name in _names(answer))
    beyond = Counter({name: count for name, count in names.items() if number(name) is None})
    able = {number(name) for name in (knows or names)}
    missing = [label for place, label in enumerate(labels) if place not in able]
    if beyond and missing:
        raise ValueError(
            f"it answers {few([name for name, _ in beyond.most_common()])} and has no label for {few(missing)}; "
            "use the same names in both"
        )
    return RestrictedAnswers([_without(answer, beyond) for answer in answers], beyond.total())


def _number(task: str, labels: tuple[str, ...]) -> Callable[[str], object]:
    read = reader(task, labels)

    def number(name: str) -> object:
        try:
            return read(name)
        except ValueError:
            return None

    return number


def _names(answer: Answer) -> list[str]:
    if isinstance(answer, str):
        return [answer]
    return [each.label if isinstance(each, NamedBox) else each for each in answer]


def _without(answer: Answer, beyond: Counter[str]) -> Answer | None:
    if isinstance(answer, str):
        return None if answer in beyond else answer
    kept = [(each, name) for each, name in zip(answer, _names(answer), strict=True) if name not in beyond]
    return tuple(each for each, _ in kept)  # type: ignore[return-value]  # all of the same kind, in order
