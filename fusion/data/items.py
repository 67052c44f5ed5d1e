"""What a reader finds: frames with an answer as the file has it, before it is known what the labels are."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from fusion.data.frames import Frames

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")


class NamedBox(NamedTuple):
    """One thing: its label, its edges in shares (0 to 1) of the picture, and how sure it is."""

    label: str
    left: float
    top: float
    right: float
    bottom: float
    confidence: float = 1.0


Answer = str | tuple[str, ...] | tuple[NamedBox, ...]


@dataclasses.dataclass(frozen=True)
class Item:
    """One sample as it was read.

    answer: a label, a number or words; several labels; or boxes. None where a teacher is to say it. place: where it
    stands ("rows.csv, line 3"). group: items of one group stay in one part. part: None where the file does not say.
    size: width and height that the answer's boxes were measured in, or None.
    """

    frames: Frames
    answer: Answer | None
    place: str
    question: str = ""
    group: str = ""
    part: Part | None = None
    size: tuple[int, int] | None = None
