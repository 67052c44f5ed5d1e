"""Small single-task networks, which a user would replace by adapters: their scores set the table's thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fusion.data.samples import Sample, Splits
from heads import TASKS, Grid, Task

_GRID: Grid = (6, 6)
_WIDTHS = (16, 32, 48, 64)  # channels of the four strided convolutions
_BATCH = 32
_LEARNING_RATE = 3e-3
_CALIBRATION = 64  # training samples that are held back


class SmallScores(NamedTuple):
    """Scores of a small model by its domain's first metric."""

    validation: float
    test: float


def score_small_model(splits: Splits, metric: str, epochs: int = 12) -> SmallScores:
    """Train a small network from scratch on a domain's training part and score it.

    It sees all frames of a sample at once. For tasks in words it chooses among the answers in the training part.

    Args:
        metric: the domain's metric, of `heads` or an exact match.
    """
    labels = splits.labels or tuple(sorted({str(sample.target) for sample in splits.train}))
    targets = _numbers(splits.train, labels) if not splits.labels else [sample.target for sample in splits.train]
    kind = splits.task if splits.labels else "classification"
    task = TASKS[kind].for_training(labels, targets)
    network = _Network(task, splits.num_frames)
    network.fit(splits.train, targets, epochs)
    if not splits.labels:
        return SmallScores(*(_exact(network, part, labels) for part in (splits.validation, splits.test)))
    validation, test = (
        task.metrics(network.answers(part), [sample.target for sample in part])[metric]
        for part in (splits.validation, splits.test)
    )
    return SmallScores(validation, test)


def _numbers(samples: Sequence[Sample], answers: Sequence[str]) -> list[Any]:
    return [answers.index(str(sample.target)) for sample in samples]


def _exact(network: _Network, samples: Sequence[Sample], answers: Sequence[str]) -> float:
    found = [answers[number] for number in network.answers(samples)]
    return sum(answer == sample.target for answer, sample in zip(found, samples, strict=True)) / len(samples)


class _Network:
    """Four strided convolutions with about 50,000 weights, with the loss and the decoding of a task head."""

    def __init__(self, task: Task, num_frames: int) -> None:
        self._task: Any = task
        self._grids = [(_GRID,)] if task.reads_images else [()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers: list[nn.Module] = []
            for wide, narrow in zip((3 * num_frames, *_WIDTHS), _WIDTHS, strict=False):
                layers += [nn.Conv2d(wide, narrow, 3, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
            last = _WIDTHS[-1]
            if task.reads_images:
                layers.append(nn.Conv2d(last, task.num_outputs, 3, 1, 1))
            else:
                layers += [nn.AdaptiveMaxPool2d(3), nn.Flatten(), nn.Linear(9 * last, task.num_outputs)]
            self._layers = nn.Sequential(*layers)

    def fit(self, samples: Sequence[Sample], targets: Sequence[Any], epochs: int) -> None:
        """Train, then calibrate on held-back samples if calibration decides about answers."""
        held = min(_CALIBRATION, len(samples) // 10) if self._task.calibration_decides else 0
        pixels = _pixels(samples)
        count = len(samples) - held
        steps = max(1, epochs * (count // _BATCH))
        optimizer = torch.optim.AdamW(self._layers.parameters(), _LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
        rng = np.random.default_rng(0)
        self._layers.train()
        for _ in range(steps):
            rows = rng.integers(count, size=_BATCH)
            logits = self._logits(pixels[rows])
            loss = self._task.loss(logits, [targets[row] for row in rows], self._grids * len(rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self._layers.eval()
        if held:
            with torch.no_grad():
                logits = self._logits(pixels[count:])
            self._task = self._task.calibrated(logits, targets[count:], self._grids * held)

    @torch.no_grad()
    def answers(self, samples: Sequence[Sample]) -> list[Any]:
        logits = [row for part in _pixels(samples).split(64) for row in self._logits(part)]
        return [self._task.decode(row, self._grids[0]).value for row in logits]

    def _logits(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """The logits of each sample, as its task takes them."""
        outputs = self._layers(pixels)
        return list(outputs.flatten(2).transpose(1, 2) if self._task.reads_images else outputs)


def _pixels(samples: Sequence[Sample]) -> torch.Tensor:
    """Frames as channels, -1 to 1, [samples, 3 * frames, height, width]."""
    frames = np.stack([np.concatenate(list(sample.frames), -1) for sample in samples])
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()
