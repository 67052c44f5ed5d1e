"""Teachers with more labels than a domain, for example a thousand classes: handling of the other labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fusion.data.items import Answer, NamedBox
from fusion.data.targets import reader

_NAMED = ("classification", "action", "binary", "multi_label", "detection")  # answered by label names
_SHOWN = 5


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
            f"it answers {_list([name for name, _ in beyond.most_common()])} and has no label for {_list(missing)}; "
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


def _list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
