"""Networks of the small models for pictures of 96 x 96 pixels, RGB from 0 to 1, and the anchor-free detector's loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from fusion.embedded.drawing import SIZE
from heads import Box

STRIDE = 8  # pixels of a picture per cell of the trunk's output
CELLS = SIZE // STRIDE
_WIDTH = 64  # channels of the trunk's output


def trunk(channels: int) -> nn.Sequential:
    """Five convolutions to features [n, 64, 12, 12]."""
    layers: list[nn.Module] = []
    for wide, narrow, stride in ((channels, 16, 2), (16, 32, 2), (32, 32, 1), (32, _WIDTH, 2), (_WIDTH, _WIDTH, 1)):
        layers += [nn.Conv2d(wide, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    """Logits [n, labels] from the largest features in each quarter of the picture."""

    def __init__(self, num_labels: int, channels: int = 3) -> None:
        super().__init__()
        self.trunk = trunk(channels)
        self.more = nn.Sequential(nn.Conv2d(_WIDTH, 96, 3, 2, 1, bias=False), nn.BatchNorm2d(96), nn.ReLU())
        self.head = nn.Linear(96 * 4, num_labels)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        features = self.more(self.trunk(pixels * 2 - 1))
        logits: torch.Tensor = self.head(F.max_pool2d(features, CELLS // 4).flatten(1))
        return logits


class ClipClassifier(Classifier):
    """A classifier of clips, [n, 3 * frames, 96, 96]: its input is the first frame, and each further frame's difference
    to the one before."""

    def __init__(self, num_labels: int, num_frames: int) -> None:
        super().__init__(num_labels, 3 * num_frames)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        change = pixels[:, 3:] - pixels[:, :-3]
        return super().forward(torch.cat([pixels[:, :3], change / 2 + 0.5], 1))


class Counter(nn.Module):
    """Logits [n, counts] from the sum over all cells of features that are at least 0, so that each object adds its
    part."""

    def __init__(self, num_counts: int) -> None:
        super().__init__()
        self.trunk = trunk(3)
        self.parts = nn.Sequential(nn.Conv2d(_WIDTH, 32, 3, 1, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, num_counts))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.parts(self.trunk(pixels * 2 - 1)).sum((2, 3)) / 8)
        return logits


class AnchorFreeDetector(nn.Module):
    """A detector without anchor boxes, with YOLOv8's output layout: [n, 4 + labels, 144], of each cell the centre and
    size of a box in pixels and a score for each label."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.trunk = trunk(3)
        self.more = nn.Sequential(nn.Conv2d(_WIDTH, _WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(_WIDTH), nn.ReLU())
        self.edges = nn.Conv2d(_WIDTH, 4, 1)
        self.labels = nn.Conv2d(_WIDTH, num_labels, 1)
        nn.init.constant_(self.labels.bias, -4.0)  # type: ignore[arg-type]  # nearly all cells are empty
        self.middles: torch.Tensor
        self.register_buffer("middles", _middles(), persistent=False)

    def raw(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Edges [n, 144, 4] (left, top, right, bottom) in pixels, and logits of labels [n, 144, labels]."""
        features = self.more(self.trunk(pixels * 2 - 1))
        distances = F.softplus(self.edges(features).flatten(2).transpose(1, 2)) * STRIDE
        edges = torch.cat([self.middles - distances[..., :2], self.middles + distances[..., 2:]], -1)
        return edges, self.labels(features).flatten(2).transpose(1, 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        edges, logits = self.raw(pixels)
        low, high = edges[..., :2], edges[..., 2:]
        return torch.cat([(low + high) / 2, high - low, logits.sigmoid()], -1).transpose(1, 2)


def _middles() -> torch.Tensor:
    """(x, y) of every cell's centre in pixels, row by row, [144, 2]."""
    at = (torch.arange(CELLS) + 0.5) * STRIDE
    return torch.stack([at.repeat(CELLS), at.repeat_interleave(CELLS)], -1)


_REACH = 1.5 * STRIDE  # pixels from a box's centre within which cells predict it
_EDGES_WEIGHT = 2.0


def targets(boxes: Sequence[Box], middles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def loss(edges: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
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
