"""What a teacher is: something small that knows one task and labels pictures, with how sure it is of each label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fusion.data.items import Answer

Clip = Sequence[np.ndarray]
"""One sample's frames: RGB uint8 [height, width, 3]."""


class Labelled(NamedTuple):
    """answer: as a file would have it. confidence: how sure, 0 to 1. num_dropped: boxes it was not sure enough of."""

    answer: Answer
    confidence: float
    num_dropped: int = 0


class Teacher(Protocol):
    """name: for reports. labels: all that it can say; empty where that is not known, or no label."""

    name: str
    labels: tuple[str, ...]

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        """One answer per sample. May raise anything where a picture is too much for it."""
