"""From answers in files to training targets: indices, counts, numbers, boxes or words."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from fusion.data.samples import Answer, Item, NamedBox, Sample, Splits, Target
from fusion.plan.schema import HEADS, MIN_LABELS, ONE_LABEL, WORDS
from heads import Box
from vlora.plan_files.errors import PlanErrors

_LIKE_YES = {"no": "no", "false": "no", "0": "no", "yes": "yes", "true": "yes", "1": "yes"}
_MOST_COUNTED = 1000
_LARGEST = 1e30  # of a target number: float32 can represent it, and float64 a sum of many squares


def targets_of(
    task: str, items: Sequence[Item], given: tuple[str, ...] | None, errors: PlanErrors
) -> tuple[tuple[str, ...], list[Target | None]]:
    """Return the labels and every item's target; None for an item reported as an error. given: the plan's labels."""
    labels = given or _labels(task, items)
    least = MIN_LABELS.get(task, 0)
    if len(labels) < least:
        errors.add(f"{least} labels are needed; the data has {', '.join(labels) or 'none'}")
    read = reader(task, labels)
    found: list[Target | None] = []
    for item in items:
        assert item.answer is not None, "the teacher has labelled every item"
        try:
            found.append(read(item.answer))
        except ValueError as error:
            found.append(None)
            errors.add(f"{item.place}: {error}")
    return labels, found


def reader(task: str, labels: tuple[str, ...]) -> Callable[[Answer], Target]:
    """A function from an answer to its target. It raises ValueError for an answer that does not match the labels."""
    index = {label: number for number, label in enumerate(labels)}
    if task == "detection":
        return lambda answer: _boxes(answer, index)
    if task == "multi_label":
        return lambda answer: _several(answer, index)
    if task == "counting":
        return lambda answer: _count(answer, labels)
    if task == "binary" and set(labels) == {"no", "yes"}:
        return lambda answer: _index(_LIKE_YES.get(_words(answer).lower(), _words(answer)), index)
    if task == "regression":
        return _number
    return (lambda answer: _index(_words(answer), index)) if labels else _words


def default_labels(task: str) -> tuple[str, ...]:
    return {"binary": ("no", "yes"), "regression": ("value",)}.get(task, ())


def labels_shown(task: str, target: Target) -> tuple[int, ...]:
    """Indices of a sample's labels; empty for tasks without labels."""
    if task in ONE_LABEL:
        assert isinstance(target, int)
        return (target,)
    if isinstance(target, tuple):
        return tuple(sorted({each.label if isinstance(each, Box) else int(each) for each in target}))
    return ()


def label_counts(splits: Splits) -> dict[str, Counter[int]]:
    """The number of samples with each label, by part."""
    shown = {name: [labels_shown(splits.task, sample.target) for sample in part] for name, part in splits.parts.items()}
    return {name: Counter(itertools.chain.from_iterable(labels)) for name, labels in shown.items()}


def _labels(task: str, items: Sequence[Item]) -> tuple[str, ...]:
    """The labels in the data: those of training items, or of all items if the data has no parts."""
    if task in ("vqa", "captioning", "referring"):
        return ()
    if always := default_labels(task):
        return always
    if task == "counting":
        counts = [_digits(item.answer) or 0 for item in items if isinstance(item.answer, str)]
        return tuple(map(str, range(min(_MOST_COUNTED, max(1, *counts, 1)) + 1)))
    names: set[str] = set()
    for item in items:
        if item.part in (None, "train"):
            answer = item.answer or ()
            names.update([answer] if isinstance(answer, str) else map(_name, answer))
    return tuple(sorted(names))


def _words(answer: Answer) -> str:
    if not isinstance(answer, str):
        raise ValueError(f"the answer is {answer!r}; words are expected")
    return answer


def _number(answer: Answer) -> float:
    try:
        value = float(_words(answer))
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        raise ValueError(f"the answer is {answer!r}; a number of at most {_LARGEST:g} is expected")
    return value


def _count(answer: Answer, labels: tuple[str, ...]) -> int:
    word = _words(answer)
    if word in labels:
        return labels.index(word)
    count = _digits(word)
    if count is None or count >= len(labels):
        raise ValueError(f"the answer is {word!r}; a count of 0 to {len(labels) - 1} is expected")
    return count


def _digits(word: str) -> int | None:
    """None if the word is not a count, or has more digits than Python parses."""
    return int(word) if word.isdecimal() and len(word) <= sys.int_info.default_max_str_digits else None


def _name(each: str | NamedBox) -> str:
    return each.label if isinstance(each, NamedBox) else each


def _several(answer: Answer, index: dict[str, int]) -> tuple[int, ...]:
    each = (answer,) if isinstance(answer, str) else tuple(map(_name, answer))
    return tuple(sorted({_index(label, index) for label in each}))


def _boxes(answer: Answer, index: dict[str, int]) -> tuple[Box, ...]:
    if isinstance(answer, str) or not all(isinstance(each, NamedBox) for each in answer):
        raise ValueError(f"the answer is {answer!r}; boxes are expected")
    return tuple(
        Box(_index(box.label, index), box.left, box.top, box.right, box.bottom)
        for box in answer
        if isinstance(box, NamedBox)
    )


def _index(label: str, index: dict[str, int]) -> int:
    if label not in index:
        raise ValueError(f"the label {label!r} is unknown; known: {', '.join(index) or 'none'}")
    return index[label]


def answer_in_words(splits: Splits, sample: Sample) -> str:
    """The target answer of the language model; empty if the target has no words."""
    target = sample.target
    if splits.task == "multi_label" and isinstance(target, tuple):
        return " , ".join(splits.labels[each] for each in target if isinstance(each, int)) or "none"
    if isinstance(target, int) and HEADS[splits.task][0] != WORDS:
        return splits.labels[target] if target < len(splits.labels) else str(target)
    return target if isinstance(target, str) else ""
