"""How each kind of task is learned and scored: from labels through a head, from words, or from boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from fusion.samples import Sample, Splits, Target
from heads import detection
from heads.tasks import TASKS

_WORDS_WEIGHT = 0.3  # of the language-model loss beside a head's: the adapter also answers in words


class Read(NamedTuple):
    """What one forward tells of n samples.

    last: hidden states of the last prompt tokens [n, hidden]. images: those of each sample's image tokens [tokens,
    hidden]. words: the mean loss of its answer's tokens [n]. exact: whether greedy decoding gives the answer [n].
    """

    last: torch.Tensor
    images: list[torch.Tensor]
    words: torch.Tensor
    exact: torch.Tensor

    def of(self, rows: Sequence[int]) -> Read:
        return Read(self.last[rows], [self.images[row] for row in rows], self.words[rows], self.exact[rows])


class Objective(Protocol):
    """num_outputs: rows of the head, 0 for none."""

    num_outputs: int

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        """A scalar to be made small."""

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        """One answer per sample, as `metric` compares them."""

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        """How good they are, 0 to 1."""


class _Choice:
    """A head over the last token chooses a label."""

    def __init__(self, task: str, num_labels: int) -> None:
        self._task = TASKS[task]
        self.num_outputs = num_labels

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        assert head is not None
        wanted = torch.tensor(targets, device=read.last.device)
        return self._task.loss(head(read.last).float(), wanted) + _WORDS_WEIGHT * read.words.mean()

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        assert head is not None
        return list(head(read.last).argmax(-1).tolist())

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        return sum(answer == target for answer, target in zip(answers, targets, strict=True)) / len(targets)


class _Words:
    """The language model's own head answers; right is word for word."""

    num_outputs = 0

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        return read.words.mean()

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        return list(read.exact.tolist())

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        return sum(map(bool, answers)) / len(targets)


class _Detection:
    """A head over every image token finds boxes. Image tokens form a square grid of one picture."""

    def __init__(self, num_labels: int) -> None:
        self.num_outputs = detection.num_outputs(num_labels)

    def loss(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> torch.Tensor:
        assert head is not None
        grid = _grid(read)
        pairs = [detection.targets(_boxes(target), grid) for target in targets]
        classes, edges = (torch.stack(values).to(read.last.device) for values in zip(*pairs, strict=True))
        return detection.loss(head(torch.stack(read.images)), classes, edges)

    def answers(self, read: Read, head: nn.Linear | None, targets: Sequence[Target]) -> list[object]:
        assert head is not None
        grid = _grid(read)
        return [detection.decode(logits.float().cpu(), grid) for logits in head(torch.stack(read.images))]

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        return detection.f1([_boxes(answer) for answer in answers], [_boxes(target) for target in targets])


def _boxes(value: object) -> tuple[detection.Box, ...]:
    assert isinstance(value, tuple | list)
    return tuple(value)


def _grid(read: Read) -> tuple[int, int]:
    side = round(len(read.images[0]) ** 0.5)
    assert side * side == len(read.images[0]), "a detection domain needs one square picture per sample"
    return side, side


def task_of(splits: Splits) -> Objective:
    if splits.task in TASKS:
        return _Choice(splits.task, len(splits.labels))
    if splits.task == "detection":
        return _Detection(len(splits.labels))
    return _Words()


def answer_in_words(splits: Splits, sample: Sample) -> str:
    """What the language model should say; empty where words cannot."""
    if isinstance(sample.target, int):
        return splits.labels[sample.target]
    return sample.target if isinstance(sample.target, str) else ""
