"""Small single-task models as a reference for a domain's adapter.

Each is trained on the domain's training part alone and answers in the domain's terms. Questions, captions and
references have none; their answers come from the renderer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import cv2
import numpy as np
import torch
from torch import nn

from fusion.data.samples import Sample, Splits
from fusion.synthetic.road_signs import ACTIONS
from fusion.teachers.opencv import FACES
from heads import detection

_GRID = (6, 6)
_EPOCHS = 12


class Learner(Protocol):
    name: str

    def fit(self, splits: Splits) -> None:
        """Train on the training part."""

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        """One label index per sample, or its boxes."""


class SupportVectors:
    """scikit-learn's support vector classifier on grey pixels of 8 x 8."""

    name = "SVC"

    def fit(self, splits: Splits) -> None:
        from sklearn.svm import SVC

        self._model = SVC(gamma=0.02 * 16, C=10).fit(self._small(splits.train), [s.target for s in splits.train])

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        return [int(label) for label in self._model.predict(self._small(samples))]

    def _small(self, samples: Sequence[Sample]) -> np.ndarray:
        inner = [cv2.cvtColor(sample.frames[0], cv2.COLOR_RGB2GRAY)[12:84, 12:84] for sample in samples]
        return np.stack([cv2.resize(grey, (8, 8), interpolation=cv2.INTER_AREA).ravel() / 255 for grey in inner])


class FaceCascade:
    """OpenCV's Haar cascade for frontal faces; label 0 if it detects one. Needs no training."""

    name = "Haar cascade"

    def __init__(self) -> None:
        self._cascade = cv2.CascadeClassifier(str(FACES))

    def fit(self, splits: Splits) -> None:
        pass

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        return [0 if self._finds(sample.frames[0]) else 1 for sample in samples]

    def _finds(self, frame: np.ndarray) -> bool:
        grey = cv2.copyMakeBorder(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), 24, 24, 24, 24, cv2.BORDER_REPLICATE)
        return len(self._cascade.detectMultiScale(grey, 1.05, 1, minSize=(48, 48))) > 0


class MotionRules:
    """Rules on how the difference to the clip's median frame moves. Written for drawn street clips."""

    name = "motion rules"

    def fit(self, splits: Splits) -> None:
        pass

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


class SmallNetwork:
    """Four strided convolutions with about 50,000 weights, trained from scratch in seconds."""

    name = "small CNN"

    def fit(self, splits: Splits) -> None:
        self._detects = splits.task == "detection"
        outputs = detection.num_outputs(len(splits.labels)) if self._detects else len(splits.labels)
        generator = np.random.default_rng(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model = _convolutions(outputs, self._detects)
        pixels = _pixels(splits.train)
        targets = [sample.target for sample in splits.train]
        optimizer = torch.optim.AdamW(self._model.parameters(), 3e-3)
        steps = _EPOCHS * (len(targets) // 32)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        self._model.train()
        for _ in range(steps):
            rows = generator.integers(len(targets), size=32)
            loss = self._loss(self._model(pixels[rows]), [targets[row] for row in rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self._model.eval()

    def _loss(self, logits: torch.Tensor, targets: Sequence[object]) -> torch.Tensor:
        if not self._detects:
            return nn.functional.cross_entropy(logits, torch.tensor(targets))
        pairs = [detection.targets(boxes, _GRID) for boxes in targets]  # type: ignore[arg-type]
        classes, edges = (torch.stack(values) for values in zip(*pairs, strict=True))
        return detection.loss(logits.flatten(2).transpose(1, 2), classes, edges)

    @torch.no_grad()
    def answers(self, samples: Sequence[Sample]) -> list[object]:
        logits = torch.cat([self._model(part) for part in _pixels(samples).split(64)])
        if not self._detects:
            return list(logits.argmax(-1).tolist())
        return [detection.decode(one, _GRID) for one in logits.flatten(2).transpose(1, 2)]


def _convolutions(outputs: int, over_cells: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in ((3, 16), (16, 32), (32, 48), (48, 64)):
        layers += [nn.Conv2d(wide, narrow, 3, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
    if over_cells:
        return nn.Sequential(*layers, nn.Conv2d(64, outputs, 3, 1, 1))
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(256, outputs))


def _pixels(samples: Sequence[Sample]) -> torch.Tensor:
    frames = np.stack([sample.frames[0] for sample in samples])
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


TEACHERS: dict[str, Callable[[], Learner]] = {
    "sklearn-digits": SupportVectors,
    "lfw-faces": FaceCascade,
    "library-photos": SmallNetwork,
    "drawn-signs": SmallNetwork,
    "drawn-actions": MotionRules,
    "drawn-traffic-detection": SmallNetwork,
}
"""By built-in source."""
