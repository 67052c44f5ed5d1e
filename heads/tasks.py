"""What a kind of task means for a head: how it learns from labels and how its logits become an answer.

Another kind of task is one more entry of `TASKS`; nothing else asks what kind a head is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Decision(NamedTuple):
    """An answer: the chosen label and every label's probability, in label order."""

    label_id: int
    label: str
    scores: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """loss: logits [n, labels] and label ids [n] to a scalar. decode: logits [labels] and the labels to an answer."""

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, tuple[str, ...]], Decision]


def _likeliest(logits: torch.Tensor, labels: tuple[str, ...]) -> Decision:
    scores = torch.softmax(logits.double(), -1)
    best = int(scores.argmax())
    return Decision(best, labels[best], tuple(scores.tolist()))


_CHOICE = Task(loss=F.cross_entropy, decode=_likeliest)
# A head over one picture and one over the frames of a clip read alike: from the last token, which has seen them all.
TASKS: dict[str, Task] = {"classification": _CHOICE, "action": _CHOICE}
