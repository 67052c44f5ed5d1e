"""Small single-task models: they label unlabelled data and serve as a reference for adapters."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TeacherResult:
    """Result of labelling or comparing with a teacher.

    score: the domain's metric of its answers on validation data; 1 if the labels are its own. dropped, dropped_boxes:
    samples, and boxes of a detector, below the minimum confidence. beyond: samples, boxes and labels (multi_label) with
    an answer that is not a label of the domain.
    """

    name: str
    score: float
    dropped: int = 0
    dropped_boxes: int = 0
    beyond: int = 0
