"""Counters for `EngineStats`, and waiting times. They do not influence decisions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Batch, EngineStats, FinishReason, Mode, RequestStatus, StepResult


@dataclasses.dataclass
class Counters:
    """Sums since the start, with the names of `EngineStats`."""

    num_steps: int = 0
    steps_by_mode: Counter[str] = dataclasses.field(default_factory=Counter)
    requests_by_mode: Counter[str] = dataclasses.field(default_factory=Counter)
    num_switches: int = 0
    switch_s: float = 0.0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_reused_tokens: int = 0
    num_computed_tokens: int = 0
    num_step_tokens: int = 0
    num_needed_tokens: int = 0
    num_encoded_patches: float = 0.0
    encode_s: float = 0.0
    saved_s: float = 0.0
    measured_saved_s: float = 0.0

    def count_step(self, batch: Batch, result: StepResult, late_s: float) -> None:
        self.num_steps += 1
        self.saved_s += batch.saved_s
        if batch.merged_adapter is not None:
            self.measured_saved_s += batch.saved_s - late_s
        if batch.items:
            self.steps_by_mode[batch.mode.value] += 1
        if result.encoded is not None:
            self.num_encoded_patches += result.encoded.num_patches
            self.encode_s += result.encoded.seconds
        if result.switched:
            self.num_switches += 1
            self.switch_s += result.switch_s

    def count_request_step(self, tracked: TrackedRequest, mode: Mode) -> None:
        if mode in tracked.steps_by_mode:
            tracked.steps_by_mode[mode] += 1
        else:
            tracked.steps_by_mode[mode] = 1
            self.requests_by_mode[mode.value] += 1

    def count_computed(self, tracked: TrackedRequest, start: int, stop: int) -> None:
        """Count a request's newly computed tokens [start, stop); prompt tokens are also counted separately."""
        self.num_step_tokens += stop - start
        self.num_needed_tokens += max(0, stop - max(start, tracked.computed_len))
        tracked.computed_len = max(tracked.computed_len, stop)
        of_prompt = max(0, min(stop, tracked.prompt_len) - start)
        tracked.num_computed += of_prompt
        self.num_computed_tokens += of_prompt

    def count_first_answer(self, tracked: TrackedRequest) -> None:
        """Count the reused prompt tokens of a request at its first answer."""
        tracked.num_reused = max(0, tracked.prompt_len - tracked.num_computed)
        self.num_reused_tokens += tracked.num_reused

    def count_ended(self, reason: FinishReason, failed: bool) -> None:
        """Count an ended request. A cancelled request did not fail."""
        self.num_finished += not failed
        self.num_failed += failed and reason != "cancelled"
        self.num_cancelled += failed and reason == "cancelled"

    def stats(
        self,
        model: str,
        admitted: Iterable[TrackedRequest],
        num_outside: int,
        num_waiting_for_kv: int,
        block_manager: BlockManager,
    ) -> EngineStats:
        running = [tracked.status is RequestStatus.RUNNING for tracked in admitted]
        return EngineStats(
            model=model,
            num_waiting=running.count(False) + num_outside,
            num_running=running.count(True),
            num_waiting_for_kv=num_waiting_for_kv,
            free_blocks=block_manager.num_free_blocks,
            total_blocks=block_manager.total_blocks,
            cached_blocks=block_manager.num_cached_blocks,
            **vars(self) | {"steps_by_mode": dict(self.steps_by_mode), "requests_by_mode": dict(self.requests_by_mode)},
        )


class WaitStats:
    """The longest wait of a request, to compare with the waiting bound.

    Attributes:
        longest_s: the longest time from entering the KV room, or from the end of the last step, to the start of the
            next step, including times without a resident adapter.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._theta_s = 0.0
        self._num_ready = 1
        self._step_s = 0.0
        self.longest_s = 0.0

    @property
    def bound_s(self) -> float:
        """theta + ceil(ready / MaxBS) * longest step, with the maximum so far for each term.

        A longer wait of a ready request, at any time, violates the bound.
        """
        return self._theta_s + -(-self._num_ready // self._max_batch_size) * self._step_s

    def record_decision(self, theta_s: float, num_ready: int) -> None:
        self._theta_s = max(self._theta_s, theta_s)
        self._num_ready = max(self._num_ready, num_ready)

    def record_wait(self, seconds: float) -> None:
        if seconds > self.longest_s:
            self.longest_s = seconds

    def record_step(self, seconds: float) -> None:
        """Record the time of a step, including the switch before it."""
        self._step_s = max(self._step_s, seconds)
