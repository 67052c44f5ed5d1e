"""Counting: softmax over the counts 0, 1, 2, ... up to the maximum in training.

A Poisson regression has one row and no upper bound, but its mean determines its confidence: a count of one or more
never gets a probability above 0.37, so its confidence would be useless. With counts as labels, any count can have a
high confidence. Labels have no order, so the loss adds a term by which 3 is closer to 4 than 9 is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import torch

from heads.classification import Classification
from heads.task import Answer, Grid, Grids, Logits, Value, label_ids, share_equal


@dataclasses.dataclass(frozen=True)
class Counting(Classification):
    """labels: the counts in words or digits, starting at zero."""

    kind: ClassVar[str] = "counting"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "within_one", "mae")

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
