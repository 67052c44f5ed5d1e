"""What heads answer and are trained with, without torch: answers, and boxes with their comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """One object: its label index and its edges, as fractions (0 to 1) of the image's width and height.

    image: index of the image in the sample.
    """

    label: int
    left: float
    top: float
    right: float
    bottom: float
    score: float = 1.0
    image: int = 0


Window = tuple[float, float, float, float]
"""The crop of an image that a model reads: left, top, width and height, as fractions of the whole image."""


def into_windows(boxes: Sequence[Box], windows: Sequence[Window]) -> tuple[Box, ...]:
    """Convert boxes of whole images to fractions of each image's window.

    Boxes are clipped to the window; boxes outside of it are dropped.
    """
    seen = []
    for box in boxes:
        left, top, width, height = windows[box.image]
        across = [min(1.0, max(0.0, (edge - left) / width)) for edge in (box.left, box.right)]
        down = [min(1.0, max(0.0, (edge - top) / height)) for edge in (box.top, box.bottom)]
        if across[0] < across[1] and down[0] < down[1]:
            seen.append(box._replace(left=across[0], top=down[0], right=across[1], bottom=down[1]))
    return tuple(seen)


def out_of_windows(boxes: Sequence[Box], windows: Sequence[Window]) -> tuple[Box, ...]:
    """Convert boxes from fractions of each image's window to fractions of the whole image, clipped to the window."""
    whole = []
    for box in boxes:
        left, top, width, height = windows[box.image]
        across = [left + width * min(1.0, max(0.0, edge)) for edge in (box.left, box.right)]
        down = [top + height * min(1.0, max(0.0, edge)) for edge in (box.top, box.bottom)]
        whole.append(box._replace(left=across[0], top=down[0], right=across[1], bottom=down[1]))
    return tuple(whole)


def iou(one: Box, other: Box) -> float:
    """Intersection over union of two boxes of one image."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (one, other)]
    return shared / (sum(areas) - shared)


def suppress(boxes: Sequence[Box], overlap: float) -> list[Box]:
    """Non-maximum suppression: drop boxes that overlap a box of higher score by more than `overlap`.

    Only boxes of the same label and image suppress each other. The result is sorted by descending score.
    """
    import cv2  # heads without boxes need no OpenCV

    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.image, box.label), []).append(box)
    kept: list[Box] = []
    # One call per group: OpenCV's batched variant offsets the groups, which fails for boxes that extend past the image.
    for group in groups.values():
        corners = [(b.left, b.top, max(1e-6, b.right - b.left), max(1e-6, b.bottom - b.top)) for b in group]
        found = cv2.dnn.NMSBoxes(corners, [box.score for box in group], 0.0, overlap)
        kept += [group[int(index)] for index in np.asarray(found).flatten()]
    return sorted(kept, key=lambda box: -box.score)


def f1_counts(found: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], overlap: float = 0.5) -> list[F1Counts]:
    """The counts of each sample for `f1_of`.

    A predicted box is correct if it matches an unmatched labelled box of its label with at least `overlap` IoU. Boxes
    of higher score are matched first.
    """
    pairs = zip(found, wanted, strict=True)
    return [(2 * sum(_takes(ours, truth, overlap)), len(ours) + len(truth)) for ours, truth in pairs]


def mean_average_precision(
    found: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], overlap: float = 0.5
) -> float:
    """Mean average precision: the area under the precision-recall curve over all samples, averaged over the labels that
    occur in `wanted`.

    Precision is made monotone first, as in PASCAL VOC since 2010. 1 if there are neither labelled nor predicted boxes.
    """
    labels = sorted({box.label for boxes in wanted for box in boxes})
    if not labels:
        return 0.0 if any(found) else 1.0
    return sum(_average_precision(found, wanted, label, overlap) for label in labels) / len(labels)


def _average_precision(
    found: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], label: int, overlap: float
) -> float:
    scores: list[float] = []
    hits: list[bool] = []
    total = 0
    for ours, truth in zip(found, wanted, strict=True):
        own = sorted((box for box in ours if box.label == label), key=lambda box: -box.score)
        truth_boxes = [box for box in truth if box.label == label]
        scores += [box.score for box in own]
        hits += _takes(own, truth_boxes, overlap)
        total += len(truth_boxes)
    if not hits:
        return 0.0
    right = np.cumsum(np.array(hits)[np.argsort(-np.array(scores), kind="stable")])
    recall = right / total
    precision = np.maximum.accumulate((right / np.arange(1, len(right) + 1))[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def _takes(found: Sequence[Box], wanted: Sequence[Box], overlap: float) -> list[bool]:
    """Whether each predicted box of one sample, by descending score, matches its best remaining labelled box."""
    left = list(wanted)
    hits = []
    for box in sorted(found, key=lambda box: -box.score):
        fitting = [other for other in left if (other.label, other.image) == (box.label, box.image)]
        best = max(fitting, key=lambda other: iou(box, other), default=None)
        hit = best is not None and iou(box, best) >= overlap
        if hit:
            assert best is not None
            left.remove(best)
        hits.append(hit)
    return hits


F1Counts = tuple[int, int]
"""Of a sample: twice the number of correct answers, and the number of answers and labels together."""


def f1_of(counts: Iterable[F1Counts]) -> float:
    """Micro F1 over samples; 1 if there are neither answers nor labels."""
    both, total = map(sum, zip(*counts, strict=True))
    return both / total if total else 1.0


Value = int | float | str | tuple[Box, ...] | tuple[int, ...] | tuple[float, ...]
"""The label or answer of a sample: a label id or a count (int), a tuple of label ids, one or several numbers, or boxes.
Text (str) is for the language model's own head; no task here accepts it."""

Grid = tuple[int, int]
"""Rows and columns of the image tokens of one image."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a head to one request.

    value: in the format of training labels, for metrics. label: the value as text. confidence: the estimated
    probability that the answer is correct, 0 to 1. The other fields are specific to the task;
    `vlora.types.HeadAnswer` documents them.
    """

    value: Value
    label: str
    confidence: float
    scores: tuple[float, ...] = ()
    label_id: int | None = None
    count: int | None = None
    chosen: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    boxes: tuple[Box, ...] = ()
