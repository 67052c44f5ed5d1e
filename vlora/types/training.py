"""Trainings in an engine, as operators see them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vlora.types.visibility import HIDDEN, admin_only

MAX_LOSSES = 100

TrainingState = Literal["running", "finished", "failed", "cancelled"]


class TrainingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The training of one adapter.

    Attributes:
        state: Finished: the adapter is registered under its name.
        step: Optimizer steps taken.
        num_steps: Optimizer steps in total.
        num_tokens: Tokens of all micro-steps so far, evaluations included.
        loss: Mean over the tokens of the last optimizer step.
        held_out_before: Mean loss over the held-out part before the first step; None without one.
        held_out_after: The same after the last step.
        seconds: Time of the engine's thread, shared equally by the adapters of a packed micro-step.
        waiting: Why no piece of it runs at present; None while pieces run.
        path: The adapter's folder, once finished.
        error: Why it failed.
        losses: Of at most `MAX_LOSSES` optimizer steps, at equal distances, the last one at the end.
        num_bad: Records that were set aside because they cannot be used.
        bad: The first of them: file, line and reason.
    """

    name: str
    state: TrainingState
    step: int
    num_steps: int
    num_tokens: int = 0
    loss: float | None = None
    held_out_before: float | None = None
    held_out_after: float | None = None
    seconds: float = 0.0
    waiting: str | None = None
    path: Annotated[str | None, admin_only(None)] = None
    error: Annotated[str | None, admin_only(f"it failed; {HIDDEN}")] = None
    losses: tuple[float, ...] = ()
    num_bad: int = 0
    bad: Annotated[tuple[str, ...], admin_only(())] = ()
