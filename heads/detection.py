"""Detection over image tokens: every token says what has its centre there, how sure it is, and how large the box is.

A head's row of logits per image token is `[nothing, label 0, label 1, ..., left, top, right, bottom]`; the last four
are distances from the token's middle to the box's edges, in shares of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F

_NOTHING_WEIGHT = 0.4  # most tokens hold no centre
_BOX_WEIGHT = 4.0
_SURE = 0.5
_SAME = 0.5  # overlap above which two boxes of one label mean one thing


class Box(NamedTuple):
    """One thing: its label's index and its edges, in shares (0 to 1) of the picture's width and height."""

    label: int
    left: float
    top: float
    right: float
    bottom: float
    score: float = 1.0


def num_outputs(num_labels: int) -> int:
    """Rows of a detection head."""
    return 1 + num_labels + 4


def targets(boxes: Sequence[Box], grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token of a grid (rows, columns): class 0 (nothing) or 1 + label, int64 [tokens]; edges [tokens, 4]."""
    rows, columns = grid
    classes = torch.zeros(rows * columns, dtype=torch.int64)
    edges = torch.zeros(rows * columns, 4)
    middles = _middles(grid)
    for box in boxes:
        row = min(rows - 1, max(0, int((box.top + box.bottom) / 2 * rows)))
        column = min(columns - 1, max(0, int((box.left + box.right) / 2 * columns)))
        token = row * columns + column
        x, y = middles[token].tolist()
        classes[token] = 1 + box.label
        edges[token] = torch.tensor([x - box.left, y - box.top, box.right - x, box.bottom - y])
    return classes, edges


def loss(logits: torch.Tensor, classes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """logits [n, tokens, outputs], classes [n, tokens], edges [n, tokens, 4]: cross entropy, and distance of edges
    where something is."""
    scores, found = logits[..., :-4].float(), logits[..., -4:].float()
    weight = torch.ones(scores.shape[-1], device=logits.device)
    weight[0] = _NOTHING_WEIGHT
    total = F.cross_entropy(scores.flatten(0, -2), classes.flatten(), weight)
    there = classes > 0
    if bool(there.any()):
        total = total + _BOX_WEIGHT * F.smooth_l1_loss(found[there], edges[there], beta=0.05)
    return total


def decode(logits: torch.Tensor, grid: tuple[int, int]) -> list[Box]:
    """Logits of one picture [tokens, outputs] to boxes, surest first; of boxes that mean one thing the surest stays."""
    logits = logits.detach().double()
    probabilities = torch.softmax(logits[:, :-4], -1)
    middles, edges = _middles(grid), logits[:, -4:]
    boxes = []
    for token in (probabilities[:, 0] < 1 - _SURE).nonzero().flatten().tolist():
        label = int(probabilities[token, 1:].argmax())
        (x, y), (left, top, right, bottom) = middles[token].tolist(), edges[token].tolist()
        score = 1 - float(probabilities[token, 0])
        boxes.append(Box(label, x - left, y - top, x + right, y + bottom, score))
    boxes.sort(key=lambda box: -box.score)
    if not boxes:
        return []
    corners = [(box.left, box.top, max(1e-6, box.right - box.left), max(1e-6, box.bottom - box.top)) for box in boxes]
    kept = cv2.dnn.NMSBoxesBatched(corners, [box.score for box in boxes], [box.label for box in boxes], 0.0, _SAME)
    return [boxes[index] for index in sorted(int(index) for index in np.array(kept).flatten())]


def f1(found: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], overlap: float = 0.5) -> float:
    """F1 over all pictures: a found box is right if it takes a wanted one of its label with that much overlap."""
    right = total_found = total_wanted = 0
    for ours, truth in zip(found, wanted, strict=True):
        left = list(truth)
        for box in sorted(ours, key=lambda box: -box.score):
            best = max((t for t in left if t.label == box.label), key=lambda t: iou(box, t), default=None)
            if best is not None and iou(box, best) >= overlap:
                left.remove(best)
                right += 1
        total_found += len(ours)
        total_wanted += len(truth)
    return 2 * right / max(1, total_found + total_wanted)


def iou(one: Box, other: Box) -> float:
    """Intersection over union of two boxes."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (one, other)]
    return shared / (sum(areas) - shared)


def _middles(grid: tuple[int, int]) -> torch.Tensor:
    """(x, y) of every token's middle, in shares of the picture, [tokens, 2]."""
    rows, columns = grid
    y = (torch.arange(rows) + 0.5) / rows
    x = (torch.arange(columns) + 0.5) / columns
    return torch.stack([x.repeat(rows), y.repeat_interleave(columns)], -1)
