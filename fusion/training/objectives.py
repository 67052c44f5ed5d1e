"""How each kind of task is learned and scored: by its head, which serving reads with the same `Task`, or in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import torch
from torch import nn

from fusion.data.samples import Sample, Splits, Target
from fusion.plan.tasks import METRICS
from fusion.training.text_metrics import overlap, token_f1
from heads import TASKS, Grid, Task

_OF_WORDS: dict[str, Callable[[str, str], float]] = {"token_f1": token_f1, "overlap": overlap}  # said, wanted
_WORDS_WEIGHT = 1.0  # of the language model's loss beside a head's: less, and other heads push words out


class Read(NamedTuple):
    """What one forward tells of n samples.

    last: hidden states of the last prompt tokens [n, hidden]. images: those of each sample's image tokens [tokens,
    hidden]. grids: how these lie, picture by picture; none where the model's tokens form no grid. words: the mean loss
    of its answer's tokens [n], 0 where it has none. exact: whether greedy decoding gives the answer [n].
    """

    last: torch.Tensor
    images: list[torch.Tensor]
    grids: list[tuple[Grid, ...]]
    words: torch.Tensor
    exact: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[Read]) -> Read:
        return cls(
            torch.cat([one.last for one in parts]),
            [image for one in parts for image in one.images],
            [grids for one in parts for grids in one.grids],
            torch.cat([one.words for one in parts]),
            torch.cat([one.exact for one in parts]),
        )

    def of(self, rows: Sequence[int]) -> Read:
        return Read(
            self.last[rows],
            [self.images[row] for row in rows],
            [self.grids[row] for row in rows],
            self.words[rows],
            self.exact[rows],
        )


class Objective(Protocol):
    """num_outputs: rows of the head, 0 for none. metric_name: what the domain's promise is about (`fusion.plan.tasks`).
    needs_text: whether that can only be told from the words that decoding gives. calibration_decides: whether how sure
    it is changes what it answers (`heads.Task`)."""

    num_outputs: int
    metric_name: str

    @property
    def needs_text(self) -> bool: ...

    @property
    def calibration_decides(self) -> bool: ...

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        """A scalar to be made small."""

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        """One answer per sample, as `metrics` compares them."""

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        """How good they are by `metric_name`, 0 to 1. Not for no samples at all."""

    def calibrated(self, reads: Sequence[Read], head: nn.Linear | None, targets: Sequence[Target]) -> Self:
        """The same, its head as sure as it is right on samples that took no part in training."""


class HeadObjective:
    """A head answers; where its domain has words, the language model learns to say the same."""

    needs_text = False

    def __init__(self, task: Task, metric_name: str) -> None:
        self.task = task
        self.num_outputs = task.num_outputs
        self.metric_name = metric_name

    @property
    def calibration_decides(self) -> bool:
        return self.task.calibration_decides

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        return self.task.loss(self.logits(read, head), targets, read.grids) + _WORDS_WEIGHT * read.words.mean()

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        pairs = zip(self.logits(read, head), read.grids, strict=True)
        return [self.task.decode(logits, grids).value for logits, grids in pairs]

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        return self.task.metrics(answers, targets)[self.metric_name]  # type: ignore[arg-type]

    def calibrated(self, reads: Sequence[Read], head: nn.Linear | None, targets: Sequence[Target]) -> Self:
        logits = [row for read in reads for row in self.logits(read, head)]
        task = self.task.calibrated(logits, targets, [grids for read in reads for grids in read.grids])
        return type(self)(task, self.metric_name)

    def logits(self, read: Read, head: nn.Linear | None) -> list[torch.Tensor]:
        """One sample's each, as its task takes them. Raises ValueError for image tokens that form no grid."""
        assert head is not None
        if not self.task.reads_images:
            return list(head(read.last))
        if not all(read.grids):
            raise ValueError(f"a {self.task.kind} head reads image tokens, but this model's form no grid")
        return list(head(torch.cat(read.images)).split([len(own) for own in read.images]))


class WordsObjective:
    """The language model's own head answers. Right is word for word, which one forward over the right answer tells;
    how many of its words are right takes decoding."""

    num_outputs = 0
    calibration_decides = False

    def __init__(self, metric_name: str) -> None:
        self.metric_name = metric_name

    @property
    def needs_text(self) -> bool:
        return self.metric_name in _OF_WORDS

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        return read.words.mean()

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        """The right ones; None in the place of one that would come out otherwise."""
        return [target if exact else None for target, exact in zip(targets, read.exact.tolist(), strict=True)]

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        """Accuracy is another name of exact match here."""
        pairs = list(zip(answers, targets, strict=True))
        if self.needs_text:
            worth = _OF_WORDS[self.metric_name]
            return sum(worth(str(answer), str(target)) for answer, target in pairs) / len(pairs)
        return sum(answer == target for answer, target in pairs) / len(pairs)

    def calibrated(self, reads: Sequence[Read], head: nn.Linear | None, targets: Sequence[Target]) -> Self:
        return self


def task_of(splits: Splits, metric: str | None = None) -> Objective:
    """What a domain's samples are trained for, and scored by: a metric of its task, None for the first. Raises
    ValueError for labels that its task cannot have."""
    chosen = metric or METRICS[splits.task][0]
    if splits.task not in TASKS:
        return WordsObjective(chosen)
    task = TASKS[splits.task].for_training(splits.labels, [sample.target for sample in splits.train])
    return HeadObjective(task, chosen)


def metric_of_some(objective: Objective, answers: Sequence[object], targets: Sequence[Target]) -> float:
    """The metric where some samples have no answer of the task (None): these are worth nothing."""
    pairs = [(answer, target) for answer, target in zip(answers, targets, strict=True) if answer is not None]
    if not pairs:
        return 0.0
    given, wanted = zip(*pairs, strict=True)
    return objective.metric(given, wanted) * len(pairs) / len(targets)


def answer_in_words(splits: Splits, sample: Sample) -> str:
    """What the language model should say; empty where words cannot."""
    target = sample.target
    if splits.task == "multi_label" and isinstance(target, tuple):
        return " , ".join(splits.labels[each] for each in target if isinstance(each, int)) or "none"
    if isinstance(target, int) and splits.task in TASKS:
        return splits.labels[target] if target < len(splits.labels) else str(target)
    return target if isinstance(target, str) else ""
