"""How good the base model is before any training: its words, read as an answer of the domain's task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.data.targets import reader
from fusion.objectives import task_of
from fusion.samples import Splits, Target


def score_of_words(splits: Splits, metric: str | None, said: Sequence[str]) -> float:
    """The domain's metric of what was said of every test sample, whatever its case; None for the task's first metric.
    Words that are no answer of the task (boxes never are) count as samples that are worth nothing."""
    read = _reader(splits)
    answers: list[object] = []
    targets: list[Target] = []
    for words, sample in zip(said, splits.test, strict=True):
        try:
            answers.append(read(words.strip().lower()))
        except ValueError:
            continue
        target = sample.target
        targets.append(target.lower() if isinstance(target, str) else target)
    if not targets:
        return 0.0
    return task_of(splits, metric).metric(answers, targets) * len(targets) / len(splits.test)


def _reader(splits: Splits) -> Callable[[str], Target]:
    read = reader(splits.task, tuple(label.lower() for label in splits.labels))
    if splits.task != "multi_label":
        return read
    return lambda words: read(tuple(each.strip() for each in words.split(",") if each.strip() != "none"))
