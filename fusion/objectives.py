"""How each kind of task is learned and scored: by its head, which serving reads with the same `Task`, or in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from fusion.samples import Sample, Splits, Target
from heads import TASKS, Grid, Task

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

    def of(self, rows: Sequence[int]) -> Read:
        return Read(
            self.last[rows],
            [self.images[row] for row in rows],
            [self.grids[row] for row in rows],
            self.words[rows],
            self.exact[rows],
        )


class Objective(Protocol):
    """num_outputs: rows of the head, 0 for none. metric_names: what `metrics` measures, the task's own first."""

    num_outputs: int

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        """A scalar to be made small."""

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        """One answer per sample, as `metrics` compares them."""

    def metrics(self, answers: Sequence[object], targets: Sequence[Target]) -> dict[str, float]:
        """How good they are, by name; see `heads.Task`."""

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        """The first of them, 0 to 1."""

    def calibrated(self, reads: Sequence[Read], head: nn.Linear | None, targets: Sequence[Target]) -> Task | None:
        """The task as sure as it is right on samples that took no part in training; None without a head."""


class HeadObjective:
    """A head answers; where its domain has words, the language model learns to say the same."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.num_outputs = task.num_outputs
        self.metric_names = task.metric_names

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        return self.task.loss(self.logits(read, head), targets, read.grids) + _WORDS_WEIGHT * read.words.mean()

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        pairs = zip(self.logits(read, head), read.grids, strict=True)
        return [self.task.decode(logits, grids).value for logits, grids in pairs]

    def metrics(self, answers: Sequence[object], targets: Sequence[Target]) -> dict[str, float]:
        return self.task.metrics(answers, targets)  # type: ignore[arg-type]

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        return self.metrics(answers, targets)[self.metric_names[0]]

    def calibrated(self, reads: Sequence[Read], head: nn.Linear | None, targets: Sequence[Target]) -> Task | None:
        logits = [row for read in reads for row in self.logits(read, head)]
        return self.task.calibrated(logits, targets, [grids for read in reads for grids in read.grids])

    def logits(self, read: Read, head: nn.Linear | None) -> list[torch.Tensor]:
        """One sample's each, as its task takes them. Raises ValueError for image tokens that form no grid."""
        assert head is not None
        if not self.task.reads_images:
            return list(head(read.last))
        if not all(read.grids):
            raise ValueError(f"a {self.task.kind} head reads image tokens, but this model's form no grid")
        return list(head(torch.cat(read.images)).split([len(own) for own in read.images]))


class WordsObjective:
    """The language model's own head answers; right is word for word."""

    num_outputs = 0
    metric_names = ("exact_match", "accuracy")

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        return read.words.mean()

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        return list(read.exact.tolist())

    def metrics(self, answers: Sequence[object], targets: Sequence[Target]) -> dict[str, float]:
        """Both names mean the same: an answer in words is right when it is word for word."""
        right = sum(map(bool, answers)) / len(targets)
        return {"exact_match": right, "accuracy": right}

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        return self.metrics(answers, targets)["exact_match"]

    def calibrated(self, reads: Sequence[Read], head: nn.Linear | None, targets: Sequence[Target]) -> Task | None:
        return None


def task_of(splits: Splits) -> Objective:
    """What a domain's samples are trained for. Raises ValueError for labels that its task cannot have."""
    if splits.task not in TASKS:
        return WordsObjective()
    return HeadObjective(TASKS[splits.task].for_training(splits.labels, [sample.target for sample in splits.train]))


def answer_in_words(splits: Splits, sample: Sample) -> str:
    """What the language model should say; empty where words cannot."""
    target = sample.target
    if splits.task == "multi_label" and isinstance(target, tuple):
        return " , ".join(splits.labels[each] for each in target if isinstance(each, int)) or "none"
    if isinstance(target, int) and splits.task in TASKS:
        return splits.labels[target] if target < len(splits.labels) else str(target)
    return target if isinstance(target, str) else ""
