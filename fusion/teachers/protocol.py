"""The teacher interface: a small single-task model that labels pictures with a confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fusion.data.items import Answer

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
