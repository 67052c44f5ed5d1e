"""Training targets and loss of the anchor-free detector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from fusion.embedded.drawing import SIZE
from fusion.rivals.networks import STRIDE
from heads import Box

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
