"""A detector as a teacher of other tasks, too: how many, whether there is one, which kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fusion.data.items import Answer, NamedBox
from fusion.teachers.protocol import Clip, Labelled

TASKS = ("detection", "counting", "binary", "multi_label", "classification")


class Detector(Protocol):
    name: str
    labels: tuple[str, ...]

    def find(self, frame: np.ndarray) -> list[NamedBox]:
        """Everything it sees in an RGB picture, however unsure."""


class FromBoxes:
    """A detector's boxes in a picture, or in a clip's first frame, as one of TASKS.

    floor: boxes less sure than this are dropped. absent: the class of a picture without any; of one with several boxes
    the class is the surest one's.
    """

    def __init__(self, detector: Detector, task: str, floor: float, absent: str) -> None:
        assert task in TASKS, task
        self.name = detector.name
        of_task = {"classification": (*detector.labels, absent), "binary": ("no", "yes"), "counting": ()}
        self.labels: tuple[str, ...] = of_task.get(task, detector.labels)
        self._detector, self._task, self._floor, self._absent = detector, task, floor, absent

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [self._one(clip[0]) for clip in clips]

    def _one(self, frame: np.ndarray) -> Labelled:
        found = self._detector.find(frame)
        boxes = sorted((box for box in found if box.confidence >= self._floor), key=lambda box: -box.confidence)
        # What it does not see it has no score for; a picture counts as sure as its surest box.
        sure = boxes[0].confidence if boxes else 1.0
        return Labelled(self._answer(tuple(boxes)), sure, len(found) - len(boxes))

    def _answer(self, boxes: tuple[NamedBox, ...]) -> Answer:
        if self._task == "detection":
            return boxes
        if self._task == "counting":
            return str(len(boxes))
        if self._task == "binary":
            return "yes" if boxes else "no"
        if self._task == "multi_label":
            return tuple(sorted({box.label for box in boxes}))
        return boxes[0].label if boxes else self._absent
