"""Small single-task models: they label unlabelled data and serve as a reference for adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import cv2
import numpy as np

from fusion.data.samples import Answer
from fusion.plan.teacher_kinds import OnnxTeacher, TorchTeacher


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


_SHOWN = 5

Clip = Sequence[np.ndarray]
"""One sample's frames: RGB uint8 [height, width, 3]."""


class Labelled(NamedTuple):
    """answer: in the form of a file's answers. confidence: 0 to 1. num_dropped: boxes below the minimum confidence."""

    answer: Answer
    confidence: float
    num_dropped: int = 0


class Teacher(Protocol):
    """name: for reports. labels: all possible labels; empty if they are unknown or answers are not labels."""

    name: str
    labels: tuple[str, ...]

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        """One answer per sample. May raise any exception for a picture that it cannot process."""


def network_input(plan: OnnxTeacher | TorchTeacher, frame: np.ndarray) -> np.ndarray:
    """RGB uint8 [height, width, 3] to float32 [3, size, size]."""
    small = cv2.resize(frame, (plan.size, plan.size), interpolation=cv2.INTER_AREA).astype(np.float32) / 255
    normal = (small - np.array(plan.mean, np.float32)) / np.array(plan.std, np.float32)
    return np.ascontiguousarray(normal.transpose(2, 0, 1))


def classify(outputs: np.ndarray, labels: Sequence[str]) -> Labelled:
    """The label with the highest mean probability over frames. outputs: logits or probabilities [frames, labels]."""
    rows = outputs.astype(np.float64)
    if rows.min() < 0 or not np.allclose(rows.sum(1), 1, atol=1e-3):
        powers = np.exp(rows - rows.max(1, keepdims=True))
        rows = powers / powers.sum(1, keepdims=True)
    mean = rows.mean(0)
    best = int(mean.argmax())
    return Labelled(labels[best], float(mean[best]))


def few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclasses.dataclass
class Classifier:
    """A `Teacher`. rows: the logits or probabilities [frames, labels] of a clip."""

    name: str
    labels: tuple[str, ...]
    rows: Callable[[Clip], np.ndarray]

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [classify(self.rows(clip), self.labels) for clip in clips]
