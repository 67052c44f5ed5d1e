"""Loss and score of each task kind: by its head, which serving decodes with the same `Task`, or in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from fusion.data.samples import Splits, Target
from fusion.plan.schema import METRICS
from fusion.training.text_metrics import overlap, token_f1
from heads import TASKS, Box, Grid, HeadSpec, Task, TaskHead
from heads.answer import F1Counts

HIDDEN_UNITS = 128


class ImageHead(nn.Module):
    """Two layers over the language model's inputs at image tokens; computes what `TaskHead.logits` computes.

    in_features: size of the inputs.
    """

    def __init__(self, in_features: int, hidden_units: int, num_outputs: int, device: torch.device) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden = nn.Linear(in_features, hidden_units, device=device)
        self.output = nn.Linear(hidden_units, num_outputs, device=device)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        for layer, deviation in ((self.hidden, self.in_features**-0.5), (self.output, 0.02)):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * deviation)
            layer.bias.zero_()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.output(F.gelu(self.hidden(F.rms_norm(rows.float(), rows.shape[-1:]))))
        return states


def stored_head(spec: HeadSpec, head: nn.Linear | ImageHead) -> TaskHead:
    layers = (head.output, head.hidden) if isinstance(head, ImageHead) else (head,)
    (weight, bias), *hidden = ((each.weight.detach().float(), each.bias.detach().float()) for each in layers)
    return TaskHead(spec, weight, bias, hidden[0] if hidden else None)


def trainable_head(head: TaskHead, device: torch.device) -> nn.Linear | ImageHead:
    outputs, inputs = head.weight.shape
    if head.hidden is None:
        module: nn.Linear | ImageHead = nn.Linear(inputs, outputs, device=device)
        named = {"weight": head.weight, "bias": head.bias}
    else:
        module = ImageHead(head.spec.hidden_size, inputs, outputs, device)
        weight, bias = head.hidden
        named = {"hidden.weight": weight, "hidden.bias": bias, "output.weight": head.weight, "output.bias": head.bias}
    module.load_state_dict(named)
    return module


_OF_WORDS: dict[str, Callable[[str, str], float]] = {"token_f1": token_f1, "overlap": overlap}  # (answer, target)
_WORDS_WEIGHT = 1.0  # of the language model's loss relative to a head's; with less, other heads displace words


ANSWERS: dict[str, Any] = {
    "detection": tuple[Box, ...],
    "multi_label": tuple[int, ...],
    "regression": float | tuple[float, ...],
}
"""Types of answers by task, where they are not labels, counts, words or None."""


class ForwardOutputs(NamedTuple):
    """Outputs of one forward over n samples.

    last: hidden states of the last prompt tokens [n, hidden]. images: hidden states of each sample's image tokens
    [tokens, hidden]. inputs: the language model's inputs at these tokens. grids: token grid of each picture; empty if
    the model's image tokens form no grid. words: mean loss over the tokens of each answer [n], 0 without an answer.
    exact: whether greedy decoding gives the answer [n].
    """

    last: torch.Tensor
    images: list[torch.Tensor]
    inputs: list[torch.Tensor]
    grids: list[tuple[Grid, ...]]
    words: torch.Tensor
    exact: torch.Tensor

    @classmethod
    def concatenated(cls, parts: Sequence[ForwardOutputs]) -> ForwardOutputs:
        return cls(
            torch.cat([one.last for one in parts]),
            [image for one in parts for image in one.images],
            [image for one in parts for image in one.inputs],
            [grids for one in parts for grids in one.grids],
            torch.cat([one.words for one in parts]),
            torch.cat([one.exact for one in parts]),
        )

    def select(self, rows: Sequence[int]) -> ForwardOutputs:
        return ForwardOutputs(
            self.last[rows],
            [self.images[row] for row in rows],
            [self.inputs[row] for row in rows],
            [self.grids[row] for row in rows],
            self.words[rows],
            self.exact[rows],
        )


class HeadObjective:
    """A head answers; if its labels have words, the language model learns the same answers.

    num_outputs: rows of the head, 0 for none. metric_name: metric of the domain's threshold (`fusion.plan.schema`).
    needs_text: whether the metric needs decoded text. calibration_decides: whether calibration changes answers
    (`heads.Task`).
    """

    needs_text = False

    def __init__(self, task: Task, metric_name: str) -> None:
        self.task = task
        self.num_outputs = task.num_outputs
        self.metric_name = metric_name

    @property
    def calibration_decides(self) -> bool:
        return self.task.calibration_decides

    def loss(self, outputs: ForwardOutputs, head: nn.Module | None, targets: Sequence[Target]) -> torch.Tensor:
        """A scalar to minimise."""
        return self.task.loss(self.logits(outputs, head), targets, outputs.grids) + _WORDS_WEIGHT * outputs.words.mean()

    def answers(self, outputs: ForwardOutputs, head: nn.Module | None, targets: Sequence[Target]) -> list[object]:
        """One answer per sample, in the form that `metric` compares."""
        pairs = zip(self.logits(outputs, head), outputs.grids, strict=True)
        return [self.task.decode(logits, grids).value for logits, grids in pairs]

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        """Score of the answers by `metric_name`, 0 to 1. Needs at least one sample."""
        return self.task.metrics(answers, targets)[self.metric_name]  # type: ignore[arg-type]

    def f1_counts(self, answers: Sequence[object], targets: Sequence[Target]) -> list[F1Counts]:
        """The counts of each sample from which `f1_of` computes the metric; empty if it is not such an F1."""
        return self.task.f1_counts(answers, targets) if self.metric_name == "f1" else []  # type: ignore[arg-type]

    def calibrated(self, batches: Sequence[ForwardOutputs], head: nn.Module | None, targets: Sequence[Target]) -> Self:
        """A copy with a head calibrated on samples that took no part in training."""
        logits = [row for outputs in batches for row in self.logits(outputs, head)]
        task = self.task.calibrated(logits, targets, [grids for outputs in batches for grids in outputs.grids])
        return type(self)(task, self.metric_name)

    def logits(self, outputs: ForwardOutputs, head: nn.Module | None) -> list[torch.Tensor]:
        """The logits of each sample, as its task takes them. Raises ValueError if image tokens form no grid."""
        assert head is not None
        if not self.task.reads_images:
            return list(head(outputs.last))
        if not all(outputs.grids):
            raise ValueError(f"a {self.task.kind} head reads image tokens, but this model's form no grid")
        images = outputs.inputs if isinstance(head, ImageHead) else outputs.images
        return list(head(torch.cat(images)).split([len(own) for own in images]))


class WordsObjective:
    """The language model answers. An exact match is found by one forward over the correct answer; metrics of single
    words need decoding."""

    num_outputs = 0
    calibration_decides = False

    def __init__(self, metric_name: str) -> None:
        self.metric_name = metric_name

    @property
    def needs_text(self) -> bool:
        return self.metric_name in _OF_WORDS

    def loss(self, outputs: ForwardOutputs, head: nn.Module | None, targets: Sequence[Target]) -> torch.Tensor:
        return outputs.words.mean()

    def answers(self, outputs: ForwardOutputs, head: nn.Module | None, targets: Sequence[Target]) -> list[object]:
        """The target if greedy decoding gives it, else None."""
        return [target if exact else None for target, exact in zip(targets, outputs.exact.tolist(), strict=True)]

    def metric(self, answers: Sequence[object], targets: Sequence[Target]) -> float:
        """Accuracy means exact match here."""
        pairs = list(zip(answers, targets, strict=True))
        if self.needs_text:
            worth = _OF_WORDS[self.metric_name]
            return sum(worth(str(answer), str(target)) for answer, target in pairs) / len(pairs)
        return sum(answer == target for answer, target in pairs) / len(pairs)

    def f1_counts(self, answers: Sequence[object], targets: Sequence[Target]) -> list[F1Counts]:
        return []

    def calibrated(self, batches: Sequence[ForwardOutputs], head: nn.Module | None, targets: Sequence[Target]) -> Self:
        return self


Objective = HeadObjective | WordsObjective


def objective_of(splits: Splits, metric: str | None = None) -> Objective:
    """The objective of a domain's samples. metric: one of its task, None for the first. Raises ValueError for labels
    that its task does not allow."""
    chosen = metric or METRICS[splits.task][0]
    if splits.task not in TASKS:
        return WordsObjective(chosen)
    task = TASKS[splits.task].for_training(splits.labels, [sample.target for sample in splits.train])
    return HeadObjective(task, chosen)


def metric_of_some(objective: Objective, answers: Sequence[object], targets: Sequence[Target]) -> float:
    """The metric with samples that have no valid answer (None); these count as 0."""
    pairs = [(answer, target) for answer, target in zip(answers, targets, strict=True) if answer is not None]
    if not pairs:
        return 0.0
    given, wanted = zip(*pairs, strict=True)
    return objective.metric(given, wanted) * len(pairs) / len(targets)
