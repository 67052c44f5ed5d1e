"""The protocol of all tasks: training loss, decoding of logits, metrics and calibration."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from heads.answer import Answer, F1Counts, Grid, Value

Logits = Sequence[torch.Tensor]
"""The logits of each sample."""

Grids = Sequence[Sequence[Grid]]
"""The grids of each sample's images."""


class Task(abc.ABC):
    """A task with its labels and parameters, a frozen dataclass. Training, evaluation and serving use the same object.

    The logits of a sample are [num_outputs] if the head reads the last prompt token. If it reads every image token
    (reads_images), they are [tokens, num_outputs], with the tokens of all images concatenated; `grids` then has the
    grid of each image.

    kind: the name in plans and files. labels: the names of the label ids of an answer.
    """

    kind: ClassVar[str]
    reads_images: ClassVar[bool] = False
    labels: tuple[str, ...]

    @property
    def num_outputs(self) -> int:
        """Number of rows of the head."""
        return len(self.labels)

    @property
    def calibration_decides(self) -> bool:
        """Whether calibration can change the answers, not only their confidence."""
        return False

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The task's parameters besides labels and rows, as in the head's file: numbers, or tuples of numbers."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # of the subclass
        return {field.name: getattr(self, field.name) for field in fields if field.name != "labels"}

    @classmethod
    def for_training(cls, labels: tuple[str, ...], values: Sequence[Value]) -> Self:
        """A new task with parameters computed from the training values. Raises ValueError for invalid labels."""
        return cls(labels)  # type: ignore[call-arg]

    @abc.abstractmethod
    def loss(self, logits: Logits, values: Sequence[Value], grids: Grids) -> torch.Tensor:
        """The training loss over samples, a scalar."""

    @abc.abstractmethod
    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """The answer for one sample."""

    @abc.abstractmethod
    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """All metrics by name, the main one first. All except those in LESS_IS_BETTER are fractions of 1. Requires at
        least one sample."""

    def f1_counts(self, found: Sequence[Value], wanted: Sequence[Value]) -> list[F1Counts]:
        """The counts of each sample from which `f1_of` computes the metric f1; empty if the task has no such f1."""
        return []

    def right(self, found: Value, wanted: Value) -> bool:
        """Whether one answer is correct; `confidence` estimates the probability of this."""
        return found == wanted

    @abc.abstractmethod
    def fitted(self, logits: Logits, values: Sequence[Value], grids: Grids) -> dict[str, Any]:
        """The parameters that calibrate confidences, from at least one (validation) sample."""

    def calibrated(self, logits: Logits, values: Sequence[Value], grids: Grids) -> Self:
        """The same task with confidences calibrated on these (validation) samples; unchanged without samples."""
        return dataclasses.replace(self, **self.fitted(logits, values, grids)) if logits else self  # type: ignore[type-var]


LESS_IS_BETTER = frozenset({"mae"})


def check_labels(labels: tuple[str, ...], least: int) -> None:
    """Raises ValueError for too few or duplicate labels."""
    if len(labels) < least or len(set(labels)) != len(labels):
        few = "one or more" if least == 1 else "two or more"
        raise ValueError(f"labels are {labels!r}; expected {few} distinct labels")


def check_positive(name: str, value: object) -> None:
    """Raises ValueError unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")


def check_share(name: str, value: object) -> None:
    """Raises ValueError unless it is a number between 0 and 1, both excluded."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}; it must be between 0 and 1")


def label_ids(values: Sequence[Value], num_labels: int, device: torch.device) -> torch.Tensor:
    """Label ids as int64 [n]. Raises ValueError for invalid label ids."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_labels:
            raise ValueError(f"{value!r} is not a label id; label ids are 0 to {num_labels - 1}")
    return torch.tensor(values, device=device)


def share_equal(found: Sequence[Value], wanted: Sequence[Value]) -> float:
    return sum(one == other for one, other in zip(found, wanted, strict=True)) / len(wanted)


_LEAST, _MOST = 1e-3, 1e3  # search range of inverse temperatures
_HALVINGS = 60


def softmax_temperature(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """The temperature that maximizes the softmax likelihood of the labels `ids` [n] under logits [n, c]."""
    logits = logits.detach().double()
    correct = logits.gather(1, ids[:, None])[:, 0]

    def slope(inverse: float) -> float:
        expected = (torch.softmax(logits * inverse, -1) * logits).sum(-1)
        return float((expected - correct).mean())

    return 1 / _zero(slope, len(logits))


def sigmoid_temperature(logits: torch.Tensor, holds: torch.Tensor) -> float:
    """The temperature that maximizes the sigmoid likelihood of the binary labels `holds` [n, c] under logits [n, c]."""
    logits = logits.detach().double()

    def slope(inverse: float) -> float:
        return float(((torch.sigmoid(logits * inverse) - holds.double()) * logits).sum(-1).mean())

    return 1 / _zero(slope, len(logits))


def _zero(slope: Callable[[float], float], num_samples: int) -> float:
    """The inverse temperature with the smallest log loss, found by bisection.

    If all samples are correct, the log loss has no minimum. A regularization towards 1, with the weight of one sample,
    keeps the result finite and the loss strictly convex.
    """
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if slope(middle) + (middle - 1) / num_samples > 0:
            high = middle
        else:
            low = middle
    return (low * high) ** 0.5
