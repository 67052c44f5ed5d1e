"""Regression, and all tasks by kind. Serving needs only the class and the entry of a kind; plans name it in
fusion/plan/schema.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from heads.answer import Answer, Grid, Value
from heads.classification import Action, Binary, Classification, Counting, MultiLabel
from heads.detection import Detection
from heads.task import Grids, Logits, Task, check_labels, check_positive

_TOLERANCE = 0.25  # default tolerance, as a fraction of the standard deviation of the training values


@dataclasses.dataclass(frozen=True)
class Regression(Task):
    """One or several numbers, one row each.

    labels: the names of the numbers. Rows predict `(value - offset) / scale`, so that one learning rate fits metres
    and percent.

    offset, scale: mean and standard deviation of the training values. tolerance: maximum error of a correct number.
    deviations: standard deviation of the error. All have one entry per label.
    """

    kind: ClassVar[str] = "regression"

    labels: tuple[str, ...]
    offset: tuple[float, ...]
    scale: tuple[float, ...]
    tolerance: tuple[float, ...]
    deviations: tuple[float, ...]

    def __post_init__(self) -> None:
        check_labels(self.labels, 1)
        for name, entries in self.parameters.items():
            if not isinstance(entries, tuple) or len(entries) != len(self.labels):
                raise ValueError(f"{name} is {entries!r}; it must hold a number for each of {len(self.labels)} labels")
            for entry in entries:
                if name != "offset":
                    check_positive(name, entry)
                elif isinstance(entry, bool) or not isinstance(entry, int | float) or not math.isfinite(entry):
                    raise ValueError(f"offset is {entry!r}; it must be a finite number")

    @classmethod
    def for_training(cls, labels: tuple[str, ...], values: Sequence[Value]) -> Self:
        """Offset and scale are the values' mean and standard deviation; the tolerance is a quarter of the scale."""
        numbers = torch.tensor([_numbers(value, len(labels)) for value in values], dtype=torch.float64)
        if not len(numbers):
            raise ValueError("a regression head needs training values, got none")
        spread = numbers.std(0, correction=0)
        # A constant number has no standard deviation; use its magnitude, or at least 1.
        spread = torch.where(spread > 0, spread, numbers[0].abs().clamp(min=1))
        scale = tuple(spread.tolist())
        return cls(labels, tuple(numbers.mean(0).tolist()), scale, tuple(_TOLERANCE * each for each in scale), scale)

    def loss(self, logits: Logits, values: Sequence[Value], grids: Grids) -> torch.Tensor:
        """Huber loss, which limits the effect of outliers."""
        together = torch.stack(list(logits)).float()
        numbers = torch.tensor([_numbers(value, len(self.labels)) for value in values], dtype=torch.float64)
        wanted = (numbers - torch.tensor(self.offset)) / torch.tensor(self.scale)
        return F.smooth_l1_loss(together, wanted.float().to(together.device))

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """confidence: the probability that every number is within its tolerance, for independent normal errors."""
        steps = logits.detach().double().tolist()
        values = tuple(o + s * step for o, s, step in zip(self.offset, self.scale, steps, strict=True))
        confidence = 1.0
        for tolerance, deviation in zip(self.tolerance, self.deviations, strict=True):
            confidence *= math.erf(tolerance / (deviation * math.sqrt(2)))
        texts = [f"{value:.4g}" for value in values]
        return Answer(
            value=values,
            label=texts[0] if len(texts) == 1 else ", ".join(map("{} {}".format, self.labels, texts)),
            confidence=confidence,
            values=values,
            deviations=self.deviations,
        )

    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """within: share of samples with every number within its tolerance. mae: mean absolute error of all numbers."""
        count = len(self.labels)
        errors = [
            abs(one - other)
            for ours, truth in zip(found, wanted, strict=True)
            for one, other in zip(_numbers(ours, count), _numbers(truth, count), strict=True)
        ]
        right = sum(self.right(ours, truth) for ours, truth in zip(found, wanted, strict=True))
        return {"within": right / len(wanted), "mae": sum(errors) / len(errors)}

    def right(self, found: Value, wanted: Value) -> bool:
        count = len(self.labels)
        pairs = zip(_numbers(found, count), _numbers(wanted, count), self.tolerance, strict=True)
        return all(abs(one - other) <= tolerance for one, other, tolerance in pairs)

    def fitted(self, logits: Logits, values: Sequence[Value], grids: Grids) -> dict[str, Any]:
        """Sets the deviations to the root mean square errors, the maximum likelihood estimate for normal errors.

        The minimum is 1/200 of the tolerance, so that exact answers on all samples do not give unlimited confidence.
        """
        found = torch.tensor([self.decode(row).values for row in logits], dtype=torch.float64)
        numbers = torch.tensor([_numbers(value, len(self.labels)) for value in values], dtype=torch.float64)
        roots = (found - numbers).square().mean(0).sqrt().tolist()
        least = [tolerance / 200 for tolerance in self.tolerance]
        return {"deviations": tuple(map(max, roots, least))}


def _numbers(value: Value, count: int) -> tuple[float, ...]:
    """The value as a tuple. Raises ValueError unless it has `count` finite numbers."""
    numbers = value if isinstance(value, tuple) else (value,)
    finite = tuple(float(each) for each in numbers if isinstance(each, int | float) and math.isfinite(each))
    if len(finite) != len(numbers) or len(finite) != count:
        raise ValueError(f"{value!r} is not {count} finite number{'s' * (count != 1)}")
    return finite


TASKS: dict[str, type[Task]] = {
    task.kind: task for task in (Classification, Action, Binary, Counting, MultiLabel, Regression, Detection)
}


def make_task(kind: str, labels: tuple[str, ...], parameters: Mapping[str, Any]) -> Task:
    """The task of a head's file. Raises ValueError with the invalid field."""
    if kind not in TASKS:
        raise ValueError(f"task is {kind!r}; known: {', '.join(sorted(TASKS))}")
    task: Callable[..., Task] = TASKS[kind]
    fields = {field.name: field for field in dataclasses.fields(TASKS[kind]) if field.name != "labels"}  # type: ignore[arg-type]
    unknown = sorted(parameters.keys() - fields.keys())
    if unknown:
        raise ValueError(f"parameter {unknown[0]!r} is not one of a {kind} head; known: {', '.join(fields)}")
    missing = [name for name, field in fields.items() if name not in parameters and _is_needed(field)]
    if missing:
        raise ValueError(f"a {kind} head needs the parameter {missing[0]!r}")
    return task(labels, **parameters)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
