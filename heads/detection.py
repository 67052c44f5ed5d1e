"""Detection over image tokens: every token predicts the class, score and size of the object centred in it.

The logits of one image token are `[nothing, label 0, label 1, ..., left, top, right, bottom]`. The last four are
distances from the token's centre to the edges of the box, as fractions of the image.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from heads.answer import Answer, Box, F1Counts, Grid, Value, f1_counts, f1_of, mean_average_precision, suppress
from heads.task import Grids, Logits, Task, check_labels, check_positive, check_share, softmax_temperature

_NOTHING_WEIGHT = 0.4  # most tokens contain no centre
_BOX_WEIGHT = 4.0
_CANDIDATE = 0.05  # minimum score of candidates; mean average precision uses boxes of every score


@dataclasses.dataclass(frozen=True)
class Detection(Task):
    """threshold: minimum probability of a reported box. overlap: two boxes of one label with more IoU than this count
    as one object. temperature: divides the logits of labels, not those of edges."""

    kind: ClassVar[str] = "detection"
    reads_images: ClassVar[bool] = True

    labels: tuple[str, ...]
    threshold: float = 0.5
    overlap: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_labels(self.labels, 1)
        check_share("threshold", self.threshold)
        check_share("overlap", self.overlap)
        check_positive("temperature", self.temperature)

    @property
    def num_outputs(self) -> int:
        return 1 + len(self.labels) + 4

    @property
    def calibration_decides(self) -> bool:
        return True  # scores decide which boxes are reported and which are suppressed

    def loss(self, logits: Logits, values: Sequence[Value], grids: Grids) -> torch.Tensor:
        """Mean over the image tokens of all samples; the grids may differ."""
        classes, edges = self._targets(values, grids)
        together = torch.cat(list(logits))
        return loss(together, classes.to(together.device), edges.to(together.device))

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """Boxes with a score of at least `threshold`.

        confidence: the lowest score of these boxes; without boxes, the confidence that there is no object. value: also
        contains boxes of lower score, which `metrics` separates by their scores.
        """
        found = candidates(logits, grids, self.temperature, _CANDIDATE, self.overlap)
        boxes = tuple(box for box in found if box.score >= self.threshold)
        counts = Counter(self.labels[box.label] for box in boxes)
        surest = max((box.score for box in found), default=_CANDIDATE)
        return Answer(
            value=tuple(found),
            label=", ".join(f"{count} {label}" for label, count in sorted(counts.items())) or "nothing",
            confidence=boxes[-1].score if boxes else 1 - surest,
            boxes=boxes,
        )

    def metrics(self, found: Sequence[Value], wanted: Sequence[Value]) -> dict[str, float]:
        """f1 and map (mean average precision), both at an overlap of 0.5."""
        ours, truth = ([boxes_of(value) for value in values] for values in (found, wanted))
        return {"f1": f1_of(self.f1_counts(found, wanted)), "map": mean_average_precision(ours, truth)}

    def f1_counts(self, found: Sequence[Value], wanted: Sequence[Value]) -> list[F1Counts]:
        return f1_counts(self._sure(map(boxes_of, found)), list(map(boxes_of, wanted)))

    def right(self, found: Value, wanted: Value) -> bool:
        """Whether all objects are found, without false positives."""
        return f1_of(self.f1_counts([found], [wanted])) == 1.0

    def fitted(self, logits: Logits, values: Sequence[Value], grids: Grids) -> dict[str, Any]:
        """Fits the temperature on the classes of single image tokens."""
        classes, _ = self._targets(values, grids)
        together = torch.cat(list(logits))[:, :-4]
        return {"temperature": softmax_temperature(together, classes.to(together.device))}

    def _sure(self, found: Iterable[Sequence[Box]]) -> list[list[Box]]:
        return [[box for box in boxes if box.score >= self.threshold] for boxes in found]

    def _targets(self, values: Sequence[Value], grids: Sequence[Sequence[Grid]]) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [
            _known_targets(tuple(box for box in boxes_of(value) if box.image == image), grid)
            for value, pictures in zip(values, grids, strict=True)
            for image, grid in enumerate(pictures)
        ]
        classes, edges = zip(*pairs, strict=True)
        return torch.cat(classes), torch.cat(edges)


def boxes_of(value: Value) -> tuple[Box, ...]:
    """The value as boxes. Raises ValueError if it is not a tuple of boxes."""
    boxes = tuple(each for each in value if isinstance(each, Box)) if isinstance(value, tuple | list) else ()
    if not isinstance(value, tuple | list) or len(boxes) != len(value):
        raise ValueError(f"{value!r} is not a tuple of boxes")
    return boxes


def targets(boxes: Sequence[Box], grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Training targets per token of one image: class 0 (nothing) or 1 + label, int64 [tokens]; edges [tokens, 4]."""
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


_known_targets = functools.lru_cache(maxsize=4096)(targets)  # a training reads each sample many times


def loss(logits: torch.Tensor, classes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the classes, plus the distance of the edges for tokens with an object.

    logits: [..., tokens, outputs]. classes: [..., tokens]. edges: [..., tokens, 4].
    """
    scores, found = logits[..., :-4].float(), logits[..., -4:].float()
    weight = torch.ones(scores.shape[-1], device=logits.device)
    weight[0] = _NOTHING_WEIGHT
    total = F.cross_entropy(scores.flatten(0, -2), classes.flatten(), weight)
    there = classes > 0
    if bool(there.any()):
        total = total + _BOX_WEIGHT * F.smooth_l1_loss(found[there], edges[there], beta=0.05)
    return total


def candidates(
    logits: torch.Tensor, grids: Sequence[Grid], temperature: float, least: float, overlap: float
) -> list[Box]:
    """Boxes with a score of at least `least` in a sample's images, after suppression, by descending score.

    logits: [tokens of all images, outputs].
    """
    assert len(logits) == sum(rows * columns for rows, columns in grids), "logits and grids have different sizes"
    logits = logits.detach().double().cpu()
    probabilities = torch.softmax(logits[:, :-4] / temperature, -1)
    boxes = []
    first = 0
    for image, grid in enumerate(grids):
        middles = _middles(grid)
        own = slice(first, first + len(middles))
        for token in (1 - probabilities[own, 0] >= least).nonzero().flatten().tolist():
            label = int(probabilities[own][token, 1:].argmax())
            (x, y), (left, top, right, bottom) = middles[token].tolist(), logits[own][token, -4:].tolist()
            score = 1 - float(probabilities[own][token, 0])
            boxes.append(Box(label, x - left, y - top, x + right, y + bottom, score, image))
        first = own.stop
    return suppress(boxes, overlap)


def _middles(grid: Grid) -> torch.Tensor:
    """(x, y) of every token's centre, as fractions of the image, [tokens, 2]."""
    rows, columns = grid
    y = (torch.arange(rows) + 0.5) / rows
    x = (torch.arange(columns) + 0.5) / columns
    return torch.stack([x.repeat(rows), y.repeat_interleave(columns)], -1)
