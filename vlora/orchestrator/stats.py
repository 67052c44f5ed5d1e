"""Counters for `EngineStats`, and waiting times. They do not influence decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Batch, EngineStats, FinishReason, Mode, RequestStatus, StepResult


class Counters:
    """Sums since the start, updated with each step, first answer, preemption and end of a request."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._steps_by_mode: Counter[Mode] = Counter()
        self._requests_by_mode: Counter[Mode] = Counter()
        self._num_switches = 0
        self._switch_s = 0.0
        self._num_finished = 0
        self._num_failed = 0
        self._num_cancelled = 0
        self._num_preemptions = 0
        self._num_reused = 0
        self._num_computed = 0
        self._num_step_tokens = 0
        self._num_needed_tokens = 0
        self._num_encoded_patches = 0.0
        self._encode_s = 0.0

    def count_step(self, batch: Batch, result: StepResult) -> None:
        self._num_steps += 1
        if batch.items:
            self._steps_by_mode[batch.mode] += 1
        if result.encoded is not None:
            self._num_encoded_patches += result.encoded.num_patches
            self._encode_s += result.encoded.seconds
        if result.switched:
            self._num_switches += 1
            self._switch_s += result.switch_s

    def count_request_step(self, tracked: TrackedRequest, mode: Mode) -> None:
        if mode in tracked.steps_by_mode:
            tracked.steps_by_mode[mode] += 1
        else:
            tracked.steps_by_mode[mode] = 1
            self._requests_by_mode[mode] += 1

    def count_computed(self, tracked: TrackedRequest, start: int, stop: int) -> None:
        """Count a request's newly computed tokens [start, stop); prompt tokens are also counted separately."""
        self._num_step_tokens += stop - start
        self._num_needed_tokens += max(0, stop - max(start, tracked.computed_len))
        tracked.computed_len = max(tracked.computed_len, stop)
        of_prompt = max(0, min(stop, tracked.prompt_len) - start)
        tracked.num_computed += of_prompt
        self._num_computed += of_prompt

    def count_first_answer(self, tracked: TrackedRequest) -> None:
        """Count the reused prompt tokens of a request at its first answer."""
        tracked.num_reused = max(0, tracked.prompt_len - tracked.num_computed)
        self._num_reused += tracked.num_reused

    def count_preempted(self, num_requests: int) -> None:
        self._num_preemptions += num_requests

    def count_ended(self, reason: FinishReason, failed: bool) -> None:
        """Count an ended request. A cancelled request did not fail."""
        self._num_finished += not failed
        self._num_failed += failed and reason != "cancelled"
        self._num_cancelled += failed and reason == "cancelled"

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
            num_steps=self._num_steps,
            steps_by_mode={mode.value: count for mode, count in self._steps_by_mode.items()},
            requests_by_mode={mode.value: count for mode, count in self._requests_by_mode.items()},
            num_switches=self._num_switches,
            switch_s=self._switch_s,
            num_waiting=running.count(False) + num_outside,
            num_running=running.count(True),
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_cancelled=self._num_cancelled,
            num_preemptions=self._num_preemptions,
            free_blocks=block_manager.num_free_blocks,
            total_blocks=block_manager.total_blocks,
            cached_blocks=block_manager.num_cached_blocks,
            num_reused_tokens=self._num_reused,
            num_computed_tokens=self._num_computed,
            num_step_tokens=self._num_step_tokens,
            num_needed_tokens=self._num_needed_tokens,
            num_waiting_for_kv=num_waiting_for_kv,
            num_encoded_patches=self._num_encoded_patches,
            encode_s=self._encode_s,
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
