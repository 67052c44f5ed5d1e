"""What every kind of task has: how its rows learn from labels, what their logits say, how good that is, how sure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch

from heads.boxes import Box

Value = int | float | str | tuple[Box, ...] | tuple[int, ...] | tuple[float, ...]
"""What is to be said of a sample, as every task has it: a label's number or a count (int), the numbers of all labels
that hold, a number or several, or boxes. Words (str) are for the language model's own head; no task here takes them."""

Grid = tuple[int, int]
"""Rows and columns of one picture's image tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a head says of one request.

    value: as labels for training are written, for metrics. label: the same in a few words. confidence: how likely it
    is right, 0 to 1. The other fields hold what their task has: see `vlora.types.HeadAnswer`, which carries them.
    """

    value: Value
    label: str
    confidence: float
    scores: tuple[float, ...] = ()
    label_id: int | None = None
    count: int | None = None
    chosen: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    boxes: tuple[Box, ...] = ()


class Task(Protocol):
    """One kind of task with its labels and what it knows beside its rows; training, evaluation and serving use the
    same object.

    A sample's logits are [num_outputs] where the head reads the last prompt token, [tokens, num_outputs] where it reads
    every image token (reads_images), the tokens of all its pictures behind each other; grids then says how each
    picture's tokens lie.

    kind: its name in plans and files. metric_names: what `metrics` measures; the first one is the task's own, and like
    every one but those in LESS_IS_BETTER a share of 1. calibration_decides: whether how sure it is changes what it
    answers, not only the confidence of that.
    """

    kind: ClassVar[str]
    reads_images: ClassVar[bool]
    metric_names: ClassVar[tuple[str, ...]]

    @property
    def labels(self) -> tuple[str, ...]:
        """What an answer's numbers stand for."""

    @property
    def num_outputs(self) -> int:
        """Rows of the head."""

    @property
    def calibration_decides(self) -> bool: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What the task knows beside labels and rows, as the head's file has it: numbers, or tuples of numbers."""

    @classmethod
    def for_training(cls, labels: tuple[str, ...], values: Sequence[Value]) -> Self:
        """A new task, with what is read off the training values. Raises ValueError for labels that cannot be."""

    def loss(
        self, logits: Sequence[torch.Tensor], values: Sequence[Value], grids: Sequence[Sequence[Grid]]
    ) -> torch.Tensor:
        """A scalar to be made small, over samples."""

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """One sample's answer."""

    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """How good answers' values are, by name: all of metric_names. Not for no samples at all."""

    def right(self, found: Value, wanted: Value) -> bool:
        """Whether one answer is right, in the sense of its confidence."""

    def calibrated(
        self, logits: Sequence[torch.Tensor], values: Sequence[Value], grids: Sequence[Sequence[Grid]]
    ) -> Self:
        """The same task, as sure as it is right on these (validation) samples; with none it stays as it is."""


LESS_IS_BETTER = frozenset({"mae"})


def check_labels(labels: tuple[str, ...], least: int) -> None:
    """Raises ValueError for too few, or two that are the same."""
    if len(labels) < least or len(set(labels)) != len(labels):
        few = "one or more" if least == 1 else "two or more"
        raise ValueError(f"labels are {labels!r}; {few} different ones are needed")


def check_positive(name: str, value: object) -> None:
    """Raises ValueError unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")


def check_share(name: str, value: object) -> None:
    """Raises ValueError unless it is a number between 0 and 1, neither of them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}; it must lie between 0 and 1")


def label_ids(values: Sequence[Value], num_labels: int, device: torch.device) -> torch.Tensor:
    """Label numbers as int64 [n]. Raises ValueError for what is none."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_labels:
            raise ValueError(f"{value!r} is no number of a label; they run from 0 to {num_labels - 1}")
    return torch.tensor(values, device=device)


def share_equal(found: Sequence[Value], wanted: Sequence[Value]) -> float:
    return sum(one == other for one, other in zip(found, wanted, strict=True)) / len(wanted)
