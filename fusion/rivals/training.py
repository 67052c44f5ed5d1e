"""Training of small models. The result depends on the data and the seed only, for a given number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from fusion.data.samples import Sample
from fusion.rivals import detector_loss
from fusion.rivals.networks import AnchorFreeDetector
from heads import Task, Value

_BATCH = 32
_LEARNING_RATE = 4e-3

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
            pairs.append(detector_loss.targets(boxes, model.middles))  # type: ignore[arg-type]
        labels, edges = (torch.stack(each) for each in zip(*pairs, strict=True))
        return detector_loss.loss(*model.raw(inputs), labels, edges)

    return loss
