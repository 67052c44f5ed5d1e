"""The small models of built-in sources that the papers compare adapters with: networks and their training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import SIZE
from heads import TASKS, Box, Task, Value
from heads.answer import suppress

STRIDE = 8  # pixels of a picture per cell of the trunk's output
CELLS = SIZE // STRIDE
_WIDTH = 64  # channels of the trunk's output


def trunk(channels: int) -> nn.Sequential:
    """Five convolutions to features [n, 64, 12, 12]."""
    layers: list[nn.Module] = []
    for wide, narrow, stride in ((channels, 16, 2), (16, 32, 2), (32, 32, 1), (32, _WIDTH, 2), (_WIDTH, _WIDTH, 1)):
        layers += [nn.Conv2d(wide, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
    return nn.Sequential(*layers)


class ClipClassifier(nn.Module):
    """Logits [n, labels] of clips [n, 3 * frames, 96, 96], from the largest features in each quarter of the picture.
    The network's input is the first frame, and each further frame's difference to the one before.
    """

    def __init__(self, num_labels: int, num_frames: int) -> None:
        super().__init__()
        self.trunk = trunk(3 * num_frames)
        self.more = nn.Sequential(nn.Conv2d(_WIDTH, 96, 3, 2, 1, bias=False), nn.BatchNorm2d(96), nn.ReLU())
        self.head = nn.Linear(96 * 4, num_labels)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        change = pixels[:, 3:] - pixels[:, :-3]
        features = self.more(self.trunk(torch.cat([2 * pixels[:, :3] - 1, change], 1)))
        logits: torch.Tensor = self.head(F.max_pool2d(features, CELLS // 4).flatten(1))
        return logits


class AnchorFreeDetector(nn.Module):
    """A detector without anchor boxes, as YOLOv8: a box of each cell, and a score for each label."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.trunk = trunk(3)
        self.more = nn.Sequential(nn.Conv2d(_WIDTH, _WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(_WIDTH), nn.ReLU())
        self.edges = nn.Conv2d(_WIDTH, 4, 1)
        self.labels = nn.Conv2d(_WIDTH, num_labels, 1)
        nn.init.constant_(self.labels.bias, -4.0)  # type: ignore[arg-type]  # nearly all cells are empty
        self.middles: torch.Tensor
        self.register_buffer("middles", _middles(), persistent=False)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Edges [n, 144, 4] (left, top, right, bottom) in pixels, and logits of labels [n, 144, labels]."""
        features = self.more(self.trunk(pixels * 2 - 1))
        distances = F.softplus(self.edges(features).flatten(2).transpose(1, 2)) * STRIDE
        edges = torch.cat([self.middles - distances[..., :2], self.middles + distances[..., 2:]], -1)
        return edges, self.labels(features).flatten(2).transpose(1, 2)


def _middles() -> torch.Tensor:
    """(x, y) of every cell's centre in pixels, row by row, [144, 2]."""
    at = (torch.arange(CELLS) + 0.5) * STRIDE
    return torch.stack([at.repeat(CELLS), at.repeat_interleave(CELLS)], -1)


_REACH = 1.5 * STRIDE  # pixels from a box's centre within which cells predict it
_EDGES_WEIGHT = 2.0


def targets_of_cells(boxes: Sequence[Box], middles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The box that each cell predicts: the nearest one within reach that contains the cell's centre.

    Args:
        boxes: of one picture.
        middles: the cells' centres in pixels [cells, 2].

    Returns:
        Labels int64 [cells], -1 for none, and edges in pixels [cells, 4].
    """
    labels = torch.full((len(middles),), -1)
    edges = torch.zeros(len(middles), 4)
    if not boxes:
        return labels, edges
    corners = torch.tensor([box[1:5] for box in boxes]) * SIZE
    offset = (middles[:, None] - (corners[:, :2] + corners[:, 2:]) / 2).abs().amax(-1)
    inside = ((middles[:, None] > corners[:, :2]) & (middles[:, None] < corners[:, 2:])).all(-1)
    nearest, chosen = offset.masked_fill(~inside | (offset > _REACH), torch.inf).min(1)
    found = nearest.isfinite()
    labels[found] = torch.tensor([box.label for box in boxes])[chosen[found]]
    edges[found] = corners[chosen[found]]
    return labels, edges


def detector_loss(
    edges: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Binary cross entropy of all scores plus generalised IoU (Rezatofighi 2019) of cells with a box, per such cell.

    edges, wanted: [n, cells, 4]. logits: [n, cells, labels]. labels: [n, cells].
    """
    there = labels >= 0
    count = max(1, int(there.sum()))
    scores = torch.zeros_like(logits)
    scores[there] = F.one_hot(labels[there], logits.shape[-1]).to(scores.dtype)
    total = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum")
    if bool(there.any()):
        total = total + _EDGES_WEIGHT * (1 - generalised_iou(edges[there], wanted[there])).sum()
    return total / count


def generalised_iou(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of pairs of boxes (left, top, right, bottom), [n, 4] each: IoU less the empty share of the smallest box around
    both."""
    shared = (torch.minimum(one[:, 2:], other[:, 2:]) - torch.maximum(one[:, :2], other[:, :2])).clamp(min=0).prod(1)
    around = (torch.maximum(one[:, 2:], other[:, 2:]) - torch.minimum(one[:, :2], other[:, :2])).prod(1)
    union = (one[:, 2:] - one[:, :2]).prod(1) + (other[:, 2:] - other[:, :2]).prod(1) - shared
    return shared / union - (around - union) / around


_SCORE, _OVERLAP = 0.5, 0.45  # of reported boxes: the least score, and the most IoU of two with one label

_BATCH = 32
_LEARNING_RATE = 4e-3


def answers(model: nn.Module, samples: Sequence[Sample]) -> list[Any]:
    """One answer per sample, as its domain's metric compares them."""
    with torch.inference_mode():
        found = model(pixels(samples))
    if not isinstance(model, AnchorFreeDetector):
        return [*found.argmax(1).tolist()]
    edges, (scores, labels) = (found[0] / SIZE).clamp(0, 1), found[1].sigmoid().max(-1)
    boxes = []
    for label_of, corners, score_of in zip(labels.tolist(), edges.tolist(), scores.tolist(), strict=True):
        cells = zip(label_of, corners, score_of, strict=True)
        likely = [Box(label, *corner, score) for label, corner, score in cells if score >= _SCORE]  # type: ignore[call-arg]
        boxes.append(tuple(suppress(likely, _OVERLAP)))
    return boxes


@dataclasses.dataclass(frozen=True)
class Rival:
    """A kind of small model. steps: of training, with 32 samples each."""

    build: Callable[[Splits], nn.Module]
    steps: int

    def train(self, splits: Splits, seed: int, *, steps: int | None = None) -> nn.Module:
        """Train on the training part, for minutes of processor time. steps: instead of the model's own number."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build(splits)
        if isinstance(model, AnchorFreeDetector):
            loss = loss_of_detector(model, splits.train, seed)
        else:
            task = TASKS[splits.task].for_training(splits.labels, [sample.target for sample in splits.train])
            loss = loss_of_task(model, task, splits.train)
        fit(model, splits.train, loss, steps or self.steps, seed)
        return model


RIVALS: dict[str, Rival] = {
    "drawn-traffic-detection": Rival(lambda splits: AnchorFreeDetector(len(splits.labels)), 500),
    "drawn-actions": Rival(lambda splits: ClipClassifier(len(splits.labels), splits.num_frames), 200),
}
"""By built-in source."""


# -- training, of which the result depends on the data and the seed only, for a given number of threads ----------------

Loss = Callable[[torch.Tensor, np.ndarray], torch.Tensor]
"""The loss of a batch: its pixels, and the indices of its samples."""


def pixels(samples: Sequence[Sample]) -> torch.Tensor:
    """RGB from 0 to 1 of each sample's frames, one after another [n, 3 * frames, height, width]."""
    frames = np.stack([np.concatenate(list(sample.frames), -1) for sample in samples])
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(255).contiguous()


def fit(model: nn.Module, samples: Sequence[Sample], loss: Loss, steps: int, seed: int) -> None:
    """Minimise a loss over batches of 32 samples, in random order, with AdamW and one cycle of the learning rate."""
    generator = np.random.default_rng(seed)
    inputs = pixels(samples)
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    order = np.empty(0, int)
    model.train()
    for _ in range(steps):
        if len(order) < _BATCH:
            order = np.concatenate([order, generator.permutation(len(samples))])
        rows, order = order[:_BATCH], order[_BATCH:]
        total = loss(inputs[rows], rows)
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.eval()


def loss_of_task(model: nn.Module, task: Task, samples: Sequence[Sample]) -> Loss:
    """The loss that an adapter's head for the task is trained with."""
    targets: list[Value] = [sample.target for sample in samples]

    def loss(inputs: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return task.loss(list(model(inputs)), [targets[row] for row in rows], ())

    return loss


def loss_of_detector(model: AnchorFreeDetector, samples: Sequence[Sample], seed: int) -> Loss:
    """The detector's loss; half of the pictures are mirrored."""
    generator = np.random.default_rng([seed, 1])

    def loss(inputs: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        mirrored = generator.random(len(rows)) < 0.5
        inputs = torch.where(torch.from_numpy(mirrored)[:, None, None, None], inputs.flip(3), inputs)
        pairs = []
        for row, mirror in zip(rows, mirrored, strict=True):
            boxes = samples[row].target
            assert isinstance(boxes, tuple)
            if mirror:
                boxes = tuple(box._replace(left=1 - box.right, right=1 - box.left) for box in boxes)  # type: ignore[union-attr]
            pairs.append(targets_of_cells(boxes, model.middles))  # type: ignore[arg-type]
        labels, edges = (torch.stack(each) for each in zip(*pairs, strict=True))
        found: tuple[torch.Tensor, torch.Tensor] = model(inputs)
        return detector_loss(*found, labels, edges)

    return loss
