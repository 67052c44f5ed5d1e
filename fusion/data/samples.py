"""What a domain is made of: pictures with what is to be said about them, in three parts that share no picture."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from heads import Value

Target = Value
_MOST_HELD_BACK = 64


@dataclasses.dataclass(frozen=True)
class Sample:
    """frames: RGB uint8 pictures [height, width, 3], one or several; those of files are decoded whenever they are asked
    for.

    target: a label's index (classification, action, binary), a count, the indices of all labels that hold
    (multi_label), a number or several (regression), what is to be found (detection), or the answer's words (vqa,
    captioning, referring). question: what is asked of this very sample; empty where the domain asks one question only.
    group: what is not independent of it has the same (frames of one video, questions about one picture); empty for a
    sample that stands alone.
    """

    frames: Sequence[np.ndarray]
    target: Target
    question: str = ""
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Splits:
    """A domain's samples, each part in random order, so that its first samples stand for all of it. labels: what a head
    chooses from, empty where the language model answers in words.

    real: photographed or scanned pixels, as opposed to rendered (synthetic) ones.
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
        """The same, with labels to be said by the language model instead of chosen by a head."""
        said = {
            name: [dataclasses.replace(sample, target=self.labels[_index(sample.target)]) for sample in part]
            for name, part in self.parts.items()
        }
        return Splits("vqa", (), said["train"], said["validation"], said["test"], self.real)


def held_back(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Places of the first training samples, a tenth of them and at most 64, or a few less, that share no group with the
    others."""
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


def _index(target: Target) -> int:
    assert isinstance(target, int), f"{target!r} is no label's index"
    return target
