"""A domain's samples: pictures with target answers, in three parts that share no picture."""

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
            name: [dataclasses.replace(sample, target=self.labels[_index(sample.target)]) for sample in part]
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


def _index(target: Target) -> int:
    assert isinstance(target, int), f"{target!r} is not a label index"
    return target
