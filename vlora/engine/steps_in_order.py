"""Runs the steps of a device that computes in the call itself, and of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vlora.errors import StepFailed
from vlora.orchestrator import Scheduler
from vlora.types import Batch, ErrorValue, RequestOutput, StepResult

OnStep = Callable[[Batch, StepResult], None]  # called before the scheduler records the result


class Runner(Protocol):
    """Runs a step, on one rank or several."""

    def run(self, batch: Batch) -> StepResult:
        """Raises StepFailed if all requests of the batch, and no others, are lost."""
        ...


class StepsInOrder:
    """Each step ends before the next one is scheduled. `pending` as in `StepsAhead`."""

    pending = False

    def __init__(self, runner: Runner, scheduler: Scheduler, on_step: OnStep) -> None:
        self._runner, self._scheduler, self._on_step = runner, scheduler, on_step

    def run(self, batch: Batch | None) -> tuple[RequestOutput, ...]:
        assert batch is not None, "no step is pending"
        try:
            result = self._runner.run(batch)
        except StepFailed as error:
            result = failed(batch, error)
        self._on_step(batch, result)
        return self._scheduler.record(batch, result)


def failed(batch: Batch, error: StepFailed) -> StepResult:
    value = ErrorValue.of(error)
    return StepResult(errors={item.request_id: value for item in batch.items})
