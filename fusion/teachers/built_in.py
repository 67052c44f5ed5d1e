"""Small single-task models as a reference for a domain's adapter.

Each is trained on the domain's training part alone and answers in the domain's terms. Questions, captions and
references have none; their answers come from the renderer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

from fusion.data.samples import Sample, Splits
from fusion.synthetic.drawn import ACTIONS
from fusion.teachers.opencv import FACES
from heads import TASKS

_GRID = (6, 6)
_EPOCHS = 12


class Learner:
    """Trained when it is created, if it needs a training."""

    name: str

    def __init__(self, splits: Splits) -> None:
        pass

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        """One label index per sample, or its boxes."""
        raise NotImplementedError


class SupportVectors(Learner):
    """scikit-learn's support vector classifier on grey pixels of 8 x 8."""

    name = "SVC"

    def __init__(self, splits: Splits) -> None:
        from sklearn.svm import SVC

        self._model = SVC(gamma=0.02 * 16, C=10).fit(self._small(splits.train), [s.target for s in splits.train])

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        return [int(label) for label in self._model.predict(self._small(samples))]

    def _small(self, samples: Sequence[Sample]) -> np.ndarray:
        inner = [cv2.cvtColor(sample.frames[0], cv2.COLOR_RGB2GRAY)[12:84, 12:84] for sample in samples]
        return np.stack([cv2.resize(grey, (8, 8), interpolation=cv2.INTER_AREA).ravel() / 255 for grey in inner])


class FaceCascade(Learner):
    """OpenCV's Haar cascade for frontal faces; label 0 if it detects one."""

    name = "Haar cascade"

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        cascade = cv2.CascadeClassifier(str(FACES))
        found: list[object] = []
        for sample in samples:
            grey = cv2.cvtColor(sample.frames[0], cv2.COLOR_RGB2GRAY)
            grey = cv2.copyMakeBorder(grey, 24, 24, 24, 24, cv2.BORDER_REPLICATE)
            found.append(0 if len(cascade.detectMultiScale(grey, 1.05, 1, minSize=(48, 48))) else 1)
        return found


class MotionRules(Learner):
    """Rules on how the difference to the clip's median frame moves. Written for drawn street clips."""

    name = "motion rules"

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        return [ACTIONS.index(self._name(sample.frames)) for sample in samples]

    def _name(self, frames: Sequence[np.ndarray]) -> str:
        grey = np.stack([cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames]).astype(np.float32)
        still = np.median(grey, 0)
        centers = []
        for frame in grey:
            rows, columns = np.nonzero(cv2.GaussianBlur(np.abs(frame - still), (5, 5), 0) > 12)
            if len(rows) > 12:
                centers.append((columns.mean(), rows.mean()))
        if len(centers) < 2:
            return "waits"
        across, down = (centers[-1][axis] - centers[0][axis] for axis in (0, 1))
        if abs(down) > abs(across):
            return "crossing" if down > 5 else "waits"
        return "waits" if abs(across) < 8 else "drives left" if across < 0 else "drives right"


class SmallNetwork(Learner):
    """Four strided convolutions with about 50,000 weights over all frames of a sample, trained from scratch in seconds.

    It has the loss and the answers of the task's head. For a task in words it chooses among the answers in the training
    part.
    """

    name = "small CNN"

    def __init__(self, splits: Splits) -> None:
        self._words = () if splits.labels else tuple(sorted({str(sample.target) for sample in splits.train}))
        targets = [self._words.index(str(s.target)) if self._words else s.target for s in splits.train]
        kind = "classification" if self._words else splits.task
        self._task = TASKS[kind].for_training(splits.labels or self._words, targets)
        self._grids = [_GRID] if self._task.reads_images else []
        generator = np.random.default_rng(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model = _convolutions(3 * splits.num_frames, self._task.num_outputs, self._task.reads_images)
        pixels = _pixels(splits.train)
        optimizer = torch.optim.AdamW(self._model.parameters(), 3e-3)
        steps = max(1, _EPOCHS * (len(targets) // 32))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        self._model.train()
        for _ in range(steps):
            rows = generator.integers(len(targets), size=32)
            chosen = [targets[row] for row in rows]
            loss = self._task.loss(self._logits(pixels[rows]), chosen, [self._grids] * len(rows))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        self._model.eval()

    @torch.no_grad()
    def answers(self, samples: Sequence[Sample]) -> list[object]:
        logits = [row for part in _pixels(samples).split(64) for row in self._logits(part)]
        values: list[Any] = [self._task.decode(row, self._grids).value for row in logits]
        return [self._words[value] for value in values] if self._words else values

    def _logits(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """Of each sample, as the task takes them."""
        outputs = self._model(pixels)
        return list(outputs.flatten(2).transpose(1, 2) if self._task.reads_images else outputs)


def _convolutions(channels: int, outputs: int, over_cells: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in ((channels, 16), (16, 32), (32, 48), (48, 64)):
        layers += [nn.Conv2d(wide, narrow, 3, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
    if over_cells:
        return nn.Sequential(*layers, nn.Conv2d(64, outputs, 3, 1, 1))
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(256, outputs))


def _pixels(samples: Sequence[Sample]) -> torch.Tensor:
    """-1 to 1, [n, 3 * frames, height, width]."""
    frames = np.stack([np.concatenate(list(sample.frames), -1) for sample in samples])
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


TEACHERS: dict[str, type[Learner]] = {
    "sklearn-digits": SupportVectors,
    "lfw-faces": FaceCascade,
    "library-photos": SmallNetwork,
    "drawn-signs": SmallNetwork,
    "drawn-actions": MotionRules,
    "drawn-traffic-detection": SmallNetwork,
}
"""By built-in source."""
