"""A detector as a teacher of other tasks as well: counting, binary, multi_label, classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fusion.data.items import NamedBox, answer_of
from fusion.teachers.protocol import Clip, Labelled

TASKS = ("detection", "counting", "binary", "multi_label", "classification")
_UNNAMED = ("counting", "binary")  # answers that do not show the labels of boxes
_SHOWN = 5


class Detector(Protocol):
    name: str
    labels: tuple[str, ...]

    def find(self, frame: np.ndarray) -> list[NamedBox]:
        """All boxes in an RGB picture, whatever their confidence."""


class FromBoxes:
    """Answers of one of TASKS from a detector's boxes in a picture, or in a clip's first frame.

    A picture with several boxes has the class of the most confident one.

    Args:
        floor: boxes below this confidence are dropped.
        absent: the class of a picture without boxes.
        only: boxes of other labels are ignored; if empty, none are.

    Raises:
        ValueError: the detector lacks one of `only`, or an answer without labels would count boxes of several.
    """

    def __init__(self, detector: Detector, task: str, floor: float, absent: str, only: tuple[str, ...] = ()) -> None:
        assert task in TASKS, task
        if unknown := sorted(set(only) - set(detector.labels)):
            raise ValueError(
                f"`only` names {', '.join(unknown)}, which {detector.name} lacks; it has {_few(detector.labels)}"
            )
        if task in _UNNAMED and not only and len(set(detector.labels)) > 1:
            raise ValueError(
                f"{task} would count boxes of all labels of {detector.name} ({_few(detector.labels)}); name those that "
                f"count, for example `only: [{detector.labels[0]}]`"
            )
        self.name = detector.name
        names = only or detector.labels
        of_task = {"classification": (*names, absent), "binary": ("no", "yes"), "counting": ()}
        self.labels: tuple[str, ...] = of_task.get(task, names)
        self._detector, self._task, self._floor, self._absent = detector, task, floor, absent
        self._names = frozenset(names)

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [self._one(clip[0]) for clip in clips]

    def _one(self, frame: np.ndarray) -> Labelled:
        found = [box for box in self._detector.find(frame) if box.label in self._names]
        boxes = sorted((box for box in found if box.confidence >= self._floor), key=lambda box: -box.confidence)
        # A picture has the confidence of its most confident box; without boxes there is no score, so 1.
        sure = boxes[0].confidence if boxes else 1.0
        return Labelled(answer_of(boxes, self._task, self._absent), sure, len(found) - len(boxes))


def _few(labels: Sequence[str]) -> str:
    more = len(labels) - _SHOWN
    return ", ".join(labels[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
