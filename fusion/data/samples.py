"""Items as readers return them, before the labels are known; then a domain's samples, pictures with target answers, in
three parts that share no picture.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fusion.data.frames import Frames
from heads import Value
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


Target = Value
_MOST_HELD_BACK = 64


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample.

    frames: RGB uint8 pictures [height, width, 3], one or several; those in files are decoded on each access. target: a
    label's index (classification, action, binary), a count, the indices of all labels that apply (multi_label), one or
    several numbers (regression), boxes (detection), or the answer's words (vqa, captioning, referring). question: the
    question for this sample; empty if the domain has a single question. group: shared by samples that are not
    independent (frames of one video, questions about one picture); empty for an independent sample.
    """

    frames: Sequence[np.ndarray]
    target: Target
    question: str = ""
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Splits:
    """A domain's samples, each part in random order, so that its first samples represent the whole part.

    labels: the labels of the head; empty if the language model answers in words. real: photographed or scanned pixels,
    as opposed to rendered (synthetic) ones.
    """

    task: str
    labels: tuple[str, ...]
    train: Sequence[Sample]
    validation: Sequence[Sample]
    test: Sequence[Sample]
    real: bool

    @property
    def num_frames(self) -> int:
        return len(self.train[0].frames)

    @property
    def parts(self) -> dict[str, Sequence[Sample]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def in_words(self) -> Splits:
        """The same samples with label names as targets of the language model instead of indices for a head."""
        parts = {
            name: [dataclasses.replace(sample, target=self.labels[sample.target]) for sample in part]  # type: ignore[index]
            for name, part in self.parts.items()
        }
        return Splits("vqa", (), parts["train"], parts["validation"], parts["test"], self.real)


def held_back(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Indices of the first training samples that share no group with the others: a tenth of the samples and at most 64,
    or slightly fewer."""
    sizes = Counter(sample.group for sample in samples if sample.group)
    groups: set[str] = set()
    kept: list[int] = []
    left = min(_MOST_HELD_BACK, len(samples) // 10)
    for place, sample in enumerate(samples):
        size = sizes.get(sample.group, 1)
        if sample.group in groups:
            kept.append(place)
        elif size <= left:
            left -= size
            kept.append(place)
            if sample.group:
                groups.add(sample.group)
    return tuple(kept)
