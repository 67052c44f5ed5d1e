"""Convolutional networks for pictures of 96 x 96 pixels: a trunk, and a head for each kind of task.

All take RGB from 0 to 1, [n, 3 * frames, 96, 96].
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fusion.embedded.drawing import SIZE

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
