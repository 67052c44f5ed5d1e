"""Teachers that know more than a domain asks, as one of a thousand classes does: what they say beyond its labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fusion.data.items import Answer, NamedBox
from fusion.data.targets import reader

_NAMED = ("classification", "action", "binary", "multi_label", "detection")  # answered by labels' names
_SHOWN = 5


class Narrowed(NamedTuple):
    """answers: as they were said, without boxes and labels of several that the domain does not know; None for a single
    label that it does not. beyond: how often either was so."""

    answers: list[Answer | None]
    beyond: int


def narrowed(task: str, labels: tuple[str, ...], said: Sequence[Answer], knows: Sequence[str]) -> Narrowed:
    """What a teacher says, as far as the domain has labels for it. knows: all that it can say; empty where that is not
    known, and what it says here stands for it.

    Raises ValueError where it says something else and has no word at all for one of the domain's labels: then the two
    call one thing by different names, and leaving that out would pass for a teacher that is often wrong.
    """
    if task not in _NAMED or not labels:
        return Narrowed(list(said), 0)
    number = _number("binary" if task == "binary" else "classification", labels)
    names = Counter(name for answer in said for name in _names(answer))
    beyond = Counter({name: count for name, count in names.items() if number(name) is None})
    able = {number(name) for name in (knows or names)}
    missing = [label for place, label in enumerate(labels) if place not in able]
    if beyond and missing:
        raise ValueError(
            f"it says {_list([name for name, _ in beyond.most_common()])}, and has no word for {_list(missing)}; "
            "give both the same names"
        )
    return Narrowed([_without(answer, beyond) for answer in said], beyond.total())


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
    return tuple(each for each, _ in kept)  # type: ignore[return-value]  # all of one kind, as they came


def _list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
