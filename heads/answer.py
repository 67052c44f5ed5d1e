"""What heads answer and are trained with, without torch."""

from __future__ import annotations

import dataclasses

from heads.boxes import Box

Value = int | float | str | tuple[Box, ...] | tuple[int, ...] | tuple[float, ...]
"""The label or answer of a sample: a label id or a count (int), a tuple of label ids, one or several numbers, or boxes.
Text (str) is for the language model's own head; no task here accepts it."""

Grid = tuple[int, int]
"""Rows and columns of the image tokens of one image."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a head to one request.

    value: in the format of training labels, for metrics. label: the value as text. confidence: the estimated
    probability that the answer is correct, 0 to 1. The other fields are specific to the task;
    `vlora.types.HeadAnswer` documents them.
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
