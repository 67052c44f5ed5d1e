"""Multi-label: any subset of several labels, by the sigmoid of one row per label."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from heads.calibration import sigmoid_temperature
from heads.f1 import F1Counts, f1_of
from heads.task import Answer, Grid, Grids, Logits, Task, Value, check_labels, check_positive, check_share


@dataclasses.dataclass(frozen=True)
class MultiLabel(Task):
    """threshold: minimum probability of a chosen label."""

    kind: ClassVar[str] = "multi_label"
    metric_names: ClassVar[tuple[str, ...]] = ("f1", "accuracy")

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
