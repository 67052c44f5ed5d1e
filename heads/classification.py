"""Classification and action recognition: one of several labels, by softmax over one row per label."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from heads.answer import Answer, F1Counts, Grid, Value, f1_of
from heads.task import (
    Grids,
    Logits,
    Task,
    check_labels,
    check_positive,
    check_share,
    label_ids,
    share_equal,
    sigmoid_temperature,
    softmax_temperature,
)


@dataclasses.dataclass(frozen=True)
class Classification(Task):
    """temperature: divides the logits; values above 1 lower the confidence."""

    kind: ClassVar[str] = "classification"

    labels: tuple[str, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_labels(self.labels, 2)
        check_positive("temperature", self.temperature)

    def loss(self, logits: Logits, values: Sequence[Value], grids: Grids) -> torch.Tensor:
        together = torch.stack(list(logits)).float()
        return F.cross_entropy(together, label_ids(values, len(self.labels), together.device))

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        scores = self.probabilities(logits)
        best = int(scores.argmax())
        return Answer(
            value=best,
            label=self.labels[best],
            confidence=float(scores[best]),
            scores=tuple(scores.tolist()),
            label_id=best,
        )

    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """f1: macro F1, the mean over the labels that occur in `found` or `wanted`."""
        pairs = list(zip(found, wanted, strict=True))
        scores = []
        for label in set(found) | set(wanted):
            said_or_wanted = sum((one == label) + (other == label) for one, other in pairs)
            scores.append(2 * sum(one == other == label for one, other in pairs) / said_or_wanted)
        return {"accuracy": share_equal(found, wanted), "f1": sum(scores) / len(scores)}

    def fitted(self, logits: Logits, values: Sequence[Value], grids: Grids) -> dict[str, Any]:
        together = torch.stack(list(logits))
        wanted = label_ids(values, len(self.labels), together.device)
        return {"temperature": softmax_temperature(together, wanted)}

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The probabilities of all labels, in float64."""
        return torch.softmax(logits.detach().double() / self.temperature, -1)


@dataclasses.dataclass(frozen=True)
class Action(Classification):
    """Action recognition over several frames. The last prompt token attends to all frames in order, so the head reads a
    clip like a single image."""

    kind: ClassVar[str] = "action"


@dataclasses.dataclass(frozen=True)
class Binary(Task):
    """labels: (negative label, positive label). threshold: the minimum probability for the positive label; set it below
    0.5 if a miss costs more than a false alarm."""

    kind: ClassVar[str] = "binary"

    labels: tuple[str, ...] = ("no", "yes")
    threshold: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_labels(self.labels, 2)
        if len(self.labels) != 2:
            raise ValueError(f"labels are {self.labels!r}; a binary head needs two: the negative, then the positive")
        check_share("threshold", self.threshold)
        check_positive("temperature", self.temperature)

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def calibration_decides(self) -> bool:
        return self.threshold != 0.5  # 0.5 is logit 0 at any temperature

    def loss(self, logits: Logits, values: Sequence[Value], grids: Grids) -> torch.Tensor:
        together = torch.stack(list(logits)).float()[:, 0]
        return F.binary_cross_entropy_with_logits(together, label_ids(values, 2, together.device).float())

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        so = float(torch.sigmoid(logits.detach().double()[0] / self.temperature))
        decision = int(so >= self.threshold)
        scores = (1 - so, so)
        return Answer(
            value=decision, label=self.labels[decision], confidence=scores[decision], scores=scores, label_id=decision
        )

    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """f1: of the positive label; 1 if there are neither positive answers nor positive labels."""
        return {"accuracy": share_equal(found, wanted), "f1": f1_of(self.f1_counts(found, wanted))}

    def f1_counts(self, found: Sequence[Value], wanted: Sequence[Value]) -> list[F1Counts]:
        pairs = zip(found, wanted, strict=True)
        return [(2 * bool(one and other), bool(one) + bool(other)) for one, other in pairs]

    def fitted(self, logits: Logits, values: Sequence[Value], grids: Grids) -> dict[str, Any]:
        together = torch.stack(list(logits))
        holds = label_ids(values, 2, together.device)[:, None] == 1
        return {"temperature": sigmoid_temperature(together, holds)}


@dataclasses.dataclass(frozen=True)
class Counting(Classification):
    """labels: the counts in words or digits, starting at zero."""

    kind: ClassVar[str] = "counting"

    @classmethod
    def for_training(cls, labels: tuple[str, ...], values: Sequence[Value]) -> Self:
        """Without labels, they are the digits up to the maximum of the values."""
        if labels:
            return cls(labels)
        most = max((value for value in values if isinstance(value, int)), default=0)
        return cls(tuple(map(str, range(max(1, most) + 1))))

    def loss(self, logits: Logits, values: Sequence[Value], grids: Grids) -> torch.Tensor:
        """Cross entropy plus the ranked probability score (Epstein 1969).

        The score is the squared distance of the cumulative probabilities, which grows with the error of a count. Both
        are proper: the true distribution minimizes them.
        """
        together = torch.stack(list(logits)).float()
        wanted = label_ids(values, len(self.labels), together.device)
        reached = (torch.arange(len(self.labels), device=together.device) >= wanted[:, None]).float()
        ranked = (torch.softmax(together, -1).cumsum(-1) - reached).square().sum(-1).mean()
        return super().loss(logits, values, grids) + ranked

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        answer = super().decode(logits)
        return dataclasses.replace(answer, count=answer.label_id, label_id=None)

    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """accuracy: exact. within_one: share with an error of at most one. mae: mean absolute error."""
        distances = [abs(_count(one) - _count(other)) for one, other in zip(found, wanted, strict=True)]
        near = sum(distance <= 1 for distance in distances) / len(distances)
        return {"accuracy": share_equal(found, wanted), "within_one": near, "mae": sum(distances) / len(distances)}


def _count(value: Value) -> int:
    assert isinstance(value, int), f"a count is a whole number, not {value!r}"
    return value


@dataclasses.dataclass(frozen=True)
class MultiLabel(Task):
    """threshold: minimum probability of a chosen label."""

    kind: ClassVar[str] = "multi_label"

    labels: tuple[str, ...]
    threshold: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_labels(self.labels, 1)
        check_share("threshold", self.threshold)
        check_positive("temperature", self.temperature)

    @property
    def calibration_decides(self) -> bool:
        return self.threshold != 0.5  # 0.5 is logit 0 at any temperature

    def loss(self, logits: Logits, values: Sequence[Value], grids: Grids) -> torch.Tensor:
        together = torch.stack(list(logits)).float()
        return F.binary_cross_entropy_with_logits(together, self._holds(values, together.device).float())

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """confidence: the probability that all labels are correct, assuming independent errors."""
        scores = torch.sigmoid(logits.detach().double() / self.temperature).tolist()
        chosen = tuple(label_id for label_id, score in enumerate(scores) if score >= self.threshold)
        confidence = 1.0
        for label_id, score in enumerate(scores):
            confidence *= score if label_id in chosen else 1 - score
        return Answer(
            value=chosen,
            label=", ".join(self.labels[label_id] for label_id in chosen) or "none",
            confidence=confidence,
            scores=tuple(scores),
            chosen=chosen,
        )

    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """f1: micro F1 over all labels of all samples; 1 if `found` and `wanted` have no labels. accuracy: share of the
        samples with all labels correct."""
        right = sum(map(self.right, found, wanted))
        return {"f1": f1_of(self.f1_counts(found, wanted)), "accuracy": right / len(wanted)}

    def f1_counts(self, found: Sequence[Value], wanted: Sequence[Value]) -> list[F1Counts]:
        pairs = [(_chosen(one), _chosen(other)) for one, other in zip(found, wanted, strict=True)]
        return [(2 * len(one & other), len(one) + len(other)) for one, other in pairs]

    def right(self, found: Value, wanted: Value) -> bool:
        return _chosen(found) == _chosen(wanted)

    def fitted(self, logits: Logits, values: Sequence[Value], grids: Grids) -> dict[str, Any]:
        together = torch.stack(list(logits))
        holds = self._holds(values, together.device)
        return {"temperature": sigmoid_temperature(together, holds)}

    def _holds(self, values: Sequence[Value], device: torch.device) -> torch.Tensor:
        """Labels as bool [n, labels]. Raises ValueError for invalid label ids."""
        holds = torch.zeros(len(values), len(self.labels), dtype=torch.bool)
        for row, value in enumerate(values):
            for label_id in _chosen(value):
                if not 0 <= label_id < len(self.labels):
                    raise ValueError(f"{label_id} is not a label id; label ids are 0 to {len(self.labels) - 1}")
                holds[row, label_id] = True
        return holds.to(device)


def _chosen(value: Value) -> frozenset[int]:
    if not isinstance(value, tuple) or not all(isinstance(each, int) for each in value):
        raise ValueError(f"{value!r} is not a tuple of label ids")
    return frozenset(each for each in value if isinstance(each, int))
