"""Classification and action recognition: one of several labels, by softmax over one row per label."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from heads.calibration import sigmoid_temperature, softmax_temperature
from heads.f1 import F1Counts, f1_of
from heads.task import (
    Answer,
    Grid,
    Grids,
    Logits,
    Task,
    Value,
    check_labels,
    check_positive,
    check_share,
    label_ids,
    share_equal,
)


@dataclasses.dataclass(frozen=True)
class Classification(Task):
    """temperature: divides the logits; values above 1 lower the confidence."""

    kind: ClassVar[str] = "classification"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "f1")

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
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "f1")

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
