"""The small model of each built-in source: its network, its training, and its file in ONNX."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import rival_networks
from benchmarks.rival_networks import AnchorFreeDetector, Classifier, ClipClassifier, Counter
from fusion.data.samples import Sample, Splits
from fusion.plan.teacher_kinds import OnnxDetectorTeacher
from fusion.teachers.onnx_detector import OnnxDetector, open_session
from heads import TASKS, Box, Task, Value

_SCORE = 0.5  # least score of a reported box, as of a detection head

_BATCH = 32
_LEARNING_RATE = 4e-3

Loss = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Rival:
    """A kind of small model. steps: of training, with 32 samples each."""

    name: str
    build: Callable[[Splits], nn.Module]
    steps: int

    def train(self, splits: Splits, seed: int, *, steps: int | None = None) -> nn.Module:
        """Train on the training part. Takes minutes of processor time.

        Args:
            steps: instead of the model's own number.
        """
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
    "drawn-traffic-detection": Rival(
        "anchor-free detector", lambda splits: AnchorFreeDetector(len(splits.labels)), 500
    ),
    "drawn-signs": Rival("classifier", lambda splits: Classifier(len(splits.labels)), 400),
    "drawn-traffic-counts": Rival("counter", lambda splits: Counter(len(splits.labels)), 500),
    "drawn-actions": Rival("action model", lambda splits: ClipClassifier(len(splits.labels), splits.num_frames), 200),
    "drawn-short-actions": Rival(
        "action model", lambda splits: ClipClassifier(len(splits.labels), splits.num_frames), 200
    ),
}
"""By built-in source."""


def export(model: nn.Module, splits: Splits, file: Path) -> None:
    """Write a trained model in ONNX, for one sample at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this exporter is the older one; the newer needs onnxscript
        torch.onnx.export(
            model, (pixels(splits.test[:1]),), file, input_names=["images"], output_names=["output0"], dynamo=False
        )


class SmallModel:
    """An exported model, run by onnxruntime: one answer per sample, as its domain's metric compares them.

    Args:
        threads: number of threads; None for torch's.
    """

    def __init__(self, file: Path, splits: Splits, *, threads: int | None = None) -> None:
        self._labels = splits.labels
        self._detector: OnnxDetector | None = None
        if splits.task == "detection":
            plan = OnnxDetectorTeacher(kind="onnx_detector", file=file, labels=splits.labels)
            self._detector = OnnxDetector(plan, threads=threads)
        else:
            self._session: Any = open_session(file, threads)

    def answer(self, sample: Sample) -> Any:
        if self._detector is not None:
            return tuple(
                Box(self._labels.index(box.label), *box[1:5], box.confidence)  # type: ignore[misc, call-arg]
                for box in self._detector.find(sample.frames[0])
                if box.confidence >= _SCORE
            )
        planes = pixels([sample]).numpy()
        (logits,) = self._session.run(None, {"images": planes})
        return int(np.argmax(logits[0]))

    def answers(self, samples: Sequence[Sample]) -> list[Any]:
        return [self.answer(sample) for sample in samples]


# Training of small models. The result depends on the data and the seed only, for a given number of threads.


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
            pairs.append(rival_networks.targets(boxes, model.middles))  # type: ignore[arg-type]
        labels, edges = (torch.stack(each) for each in zip(*pairs, strict=True))
        return rival_networks.loss(*model.raw(inputs), labels, edges)

    return loss
