"""The progress of a training, as its checkpoint has it beside the adapter."""

from __future__ import annotations

import dataclasses
from typing import Literal

Phase = Literal["before", "train", "after", "done"]


@dataclasses.dataclass
class Progress:
    """All numbers of a training that change.

    Attributes:
        phase: Evaluation before the first step, training, evaluation after the last step, or complete.
        place: Records used in the current optimizer step, or in the current evaluation.
        num_passed: Records of the training part that were passed over, because they cannot be used.
        bad, bad_held_out: Places of the records that cannot be used, in both parts.
        reasons: Of the first of them, with file and line.
        losses: Of every optimizer step.
        num_tokens: Tokens of all micro-steps so far, evaluations included.
        total, count: Sum of losses and number of tokens in the current evaluation.
        held_out_before, held_out_after: Mean losses over the held-out part.
        seconds: Time of the engine's thread.
    """

    phase: Phase = "before"
    step: int = 0
    place: int = 0
    num_passed: int = 0
    bad: list[int] = dataclasses.field(default_factory=list)
    bad_held_out: list[int] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    total: float = 0.0
    count: int = 0
    held_out_before: float | None = None
    held_out_after: float | None = None
    seconds: float = 0.0
