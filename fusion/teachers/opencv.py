"""Detectors that ship with OpenCV, and ONNX classifiers through its dnn module. None runs code from a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from fusion.data.samples import NamedBox
from fusion.plan.teacher_kinds import OnnxTeacher
from fusion.teachers import Classifier, network_input

FACES = Path(cv2.__file__).parent / "data" / "haarcascade_frontalface_default.xml"
_SCALE_STEP = 1.05
_FEWEST_HITS = 2  # overlapping windows that make a detection


class Cascade:
    """Haar or LBP features in a cascade of boosted stages.

    The confidence is the last stage's score, mapped to 0 to 1; it gives an order, not a probability. Raises ValueError
    for a file that is not a cascade.
    """

    def __init__(self, file: Path | None, label: str) -> None:
        file = file or FACES
        self.name = f"cascade {file.stem}"
        self.labels: tuple[str, ...] = (label,)
        # OpenCV raises its own error for some broken files, and returns an empty cascade for others.
        try:
            self._cascade = cv2.CascadeClassifier(str(file))
        except (cv2.error, SystemError) as error:
            raise ValueError(f"{file} is not a cascade that OpenCV can read") from error
        if self._cascade.empty():
            raise ValueError(f"{file} is not a cascade that OpenCV can read")

    def find(self, frame: np.ndarray) -> list[NamedBox]:
        grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        places, _, weights = self._cascade.detectMultiScale3(grey, _SCALE_STEP, _FEWEST_HITS, outputRejectLevels=True)
        return _boxes(self.labels[0], places, weights, frame)


class People:
    """OpenCV's people detector: histograms of oriented gradients and a linear SVM. The confidence is its margin, mapped
    to 0 to 1. Detects upright people of at least 128 pixels."""

    name = "HOG people detector"

    def __init__(self, label: str) -> None:
        self.labels: tuple[str, ...] = (label,)
        self._hog = cv2.HOGDescriptor()
        self._hog.setSVMDetector(np.array(cv2.HOGDescriptor.getDefaultPeopleDetector()))

    def find(self, frame: np.ndarray) -> list[NamedBox]:
        width, height = self._hog.winSize
        if frame.shape[0] < height or frame.shape[1] < width:
            return []  # OpenCV reads out of bounds for such a picture
        places, weights = self._hog.detectMultiScale(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR), scale=_SCALE_STEP)
        return _boxes(self.labels[0], places, weights, frame)


def onnx_classifier(plan: OnnxTeacher) -> Classifier:
    """Raises ValueError for a file that OpenCV cannot run, or if the numbers of outputs and labels differ."""
    file = plan.file

    def outputs_of(frame: np.ndarray) -> np.ndarray:
        # One at a time: many exported models accept only batches of 1.
        net.setInput(network_input(plan, frame)[None])
        return np.asarray(net.forward())[0]

    try:
        net = cv2.dnn.readNetFromONNX(str(file))
        outputs = outputs_of(np.zeros((8, 8, 3), np.uint8))
    except cv2.error as error:
        raise ValueError(f"{file} cannot be run by OpenCV: {error.err or error}") from error
    if outputs.shape != (len(plan.labels),):
        raise ValueError(
            f"{file} gives outputs of the shape {outputs.shape} for {len(plan.labels)} labels; a detector is "
            "`kind: onnx_detector`"
        )
    return Classifier(f"ONNX {file.stem}", plan.labels, lambda clip: np.stack([outputs_of(frame) for frame in clip]))


def _boxes(label: str, places: Sequence[Sequence[int]], weights: Sequence[float], frame: np.ndarray) -> list[NamedBox]:
    height, width = frame.shape[:2]
    return [
        NamedBox(
            label,
            max(0.0, x / width),
            max(0.0, y / height),
            min(1.0, (x + w) / width),
            min(1.0, (y + h) / height),
            1 / (1 + math.exp(-float(weight))),
        )
        for (x, y, w, h), weight in zip(places, np.ravel(weights), strict=True)
    ]
