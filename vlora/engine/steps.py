"""Runs the steps: in order, or ahead on a GPU: the host schedules and launches a step while the device computes the one
before.

The device runs everything in the order of one stream: a later step, a block that is moved, an adapter that is loaded
into freed pages (`RingTransfer` waits for the steps launched before). The host learns the results of a step later: its
tokens, which answers end, errors, and times. docs/decisions/0055-steps-ahead-on-a-gpu.md has the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from vlora.engine.tensor_parallel.coordinator import TensorParallelRunner
from vlora.errors import StepFailed
from vlora.memory.block_manager import WrittenBlocks
from vlora.models.launched_step import LaunchedStep
from vlora.models.runner import ModelRunner
from vlora.orchestrator.scheduler import Scheduler
from vlora.types import Batch, ErrorValue, Request, RequestOutput, StepResult

OnStep = Callable[[Batch, StepResult], None]  # called before the scheduler records the result


class StepsInOrder:
    """For a device that computes in the call itself, and for several ranks. `pending` as in `StepsAhead`."""

    pending = False

    def __init__(self, runner: ModelRunner | TensorParallelRunner, scheduler: Scheduler, on_step: OnStep) -> None:
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


@dataclasses.dataclass(eq=False)
class StepsAhead:
    """Keeps at most one step in flight while the next one is scheduled.

    A step stays in flight only if its requests need nothing of their last token on the host: text without grammar,
    penalties and log probabilities. Other steps, and those that encode images, have switched weights or have failed for
    a request, change inputs of the next decision and are collected at once.
    """

    runner: ModelRunner
    scheduler: Scheduler
    block_manager: WrittenBlocks
    on_step: OnStep

    def __post_init__(self) -> None:
        self._in_flight: tuple[Batch, LaunchedStep] | None = None
        self._plain: set[str] = set()  # unfinished requests that need nothing of their last token on the host

    @property
    def pending(self) -> bool:
        return self._in_flight is not None

    def add(self, request: Request) -> None:
        sampling = request.sampling
        if (
            not request.in_one_pass
            and sampling.grammar is None
            and sampling.logprobs is None
            and sampling.repetition_penalty == 1
            and not sampling.frequency_penalty
            and not sampling.presence_penalty
        ):
            self._plain.add(request.request_id)

    def release(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        self._plain.discard(request_id)

    def make_room(self) -> tuple[RequestOutput, ...]:
        """Collect the step in flight if the next one may lack blocks, because requests in flight are not preempted.

        Returns:
            The outputs of the step.
        """
        return self._collect() if self.pending and self.scheduler.demand.blocks_short() else ()

    def run(self, batch: Batch | None) -> tuple[RequestOutput, ...]:
        """Launch a step, then collect and record the one in flight; without a batch only the latter.

        Returns:
            The outputs of the collected steps.
        """
        if batch is None:
            return self._collect()
        try:
            step = self.runner.launch(batch)
        except StepFailed as error:
            outputs = self._collect()
            self.scheduler.advance(batch)
            return outputs + self._finish(batch, failed(batch, error))
        ids = [item.request_id for item in batch.items]
        outputs = self._collect(written=ids)
        self.scheduler.advance(batch)
        self._in_flight = batch, step
        if batch.encode is None and not step.switched and not step.errors and self._plain.issuperset(ids):
            return outputs
        return outputs + self._collect()

    def _collect(self, written: Collection[str] = ()) -> tuple[RequestOutput, ...]:
        """Collect and record the step in flight. written: the requests of the step after it, if that was launched."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            self.block_manager.keep_written(written)
            return ()
        batch, step = in_flight
        try:
            result = self.runner.collect(step)
        except StepFailed as error:
            result = failed(batch, error)
        self.block_manager.keep_written(written)
        return self._finish(batch, result)

    def _finish(self, batch: Batch, result: StepResult) -> tuple[RequestOutput, ...]:
        self.on_step(batch, result)
        return self.scheduler.finish(batch, result)
