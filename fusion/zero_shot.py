"""How good the base model is before any training: its words, read as an answer of the domain's task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.data.targets import reader
from fusion.objectives import metric_of_some, task_of
from fusion.samples import Splits, Target


def score_of_words(splits: Splits, metric: str | None, said: Sequence[str]) -> float:
    """The domain's metric of what was said of every test sample, whatever its case; None for the task's first metric.
    Words that are no answer of the task (boxes never are) count as samples that are worth nothing."""
    read = _reader(splits)
    answers: list[object] = []
    for words in said:
        try:
            answers.append(read(words.strip().lower()))
        except ValueError:
            answers.append(None)
    targets = [sample.target.lower() if isinstance(sample.target, str) else sample.target for sample in splits.test]
    return metric_of_some(task_of(splits, metric), answers, targets)


def _reader(splits: Splits) -> Callable[[str], Target]:
    read = reader(splits.task, tuple(label.lower() for label in splits.labels))
    if splits.task != "multi_label":
        return read
    return lambda words: read(tuple(each.strip() for each in words.split(",") if each.strip() != "none"))
