"""Items as readers return them: frames with the answer from the file, before the labels are known."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fusion.data.frames import Frames
from vlora.training.records import PART_NAMES, Part


class NamedBox(NamedTuple):
    """One object: its label, its edges as shares (0 to 1) of the picture, and its confidence."""

    label: str
    left: float
    top: float
    right: float
    bottom: float
    confidence: float = 1.0


Answer = str | tuple[str, ...] | tuple[NamedBox, ...]


def answer_of(boxes: Sequence[NamedBox], task: str, absent: str = "") -> Answer:
    """A picture's answer by its boxes, the most confident first. absent: the class of a picture without boxes."""
    match task:
        case "counting":
            return str(len(boxes))
        case "binary":
            return "yes" if boxes else "no"
        case "multi_label":
            return tuple(sorted({box.label for box in boxes}))
        case "classification":
            return boxes[0].label if boxes else absent
    return tuple(boxes)


@dataclasses.dataclass(frozen=True)
class Item:
    """One sample as it was read.

    answer: a label, a number or words; several labels; or boxes. None if a teacher labels the item. place: its source
    ("rows.csv, line 3"). group: items of one group stay in one part. part: None if the file does not define it. size:
    width and height that the answer's boxes refer to, or None.
    """

    frames: Frames
    answer: Answer | None
    place: str
    question: str = ""
    group: str = ""
    part: Part | None = None
    size: tuple[int, int] | None = None


def part_in(name: str) -> Part | None:
    """The part that a file's or folder's name shows: "instances_train2017" is of train."""
    words = (PART_NAMES.get(word) for word in re.split(r"[^a-z]+", name.lower()))
    return next((part for part in words if part is not None), None)


def source_picture(file: Path) -> str:
    """The group of a picture: Roboflow's augmented copies of one picture are named SOURCE.rf.HASH.jpg."""
    return str(file.parent / file.name.partition(".rf.")[0]) if ".rf." in file.name else str(file)
