"""Counters for `EngineStats`. They do not influence decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vlora.memory.books import BlockTables
from vlora.orchestrator.request_state import Tracked
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

    def step(self, batch: Batch, result: StepResult) -> None:
        """Count a step, and the switch before it."""
        self._num_steps += 1
        if batch.items:
            self._steps_by_mode[batch.mode] += 1
        if result.encoded is not None:
            self._num_encoded_patches += result.encoded.num_patches
            self._encode_s += result.encoded.seconds
        if result.switched:
            self._num_switches += 1
            self._switch_s += result.switch_s

    def took_part(self, tracked: Tracked, mode: Mode) -> None:
        """Count a request's step, in its own timings too."""
        if mode in tracked.steps_by_mode:
            tracked.steps_by_mode[mode] += 1
        else:
            tracked.steps_by_mode[mode] = 1
            self._requests_by_mode[mode] += 1

    def computed(self, tracked: Tracked, start: int, stop: int) -> None:
        """Count a request's newly computed tokens [start, stop); prompt tokens are also counted separately."""
        self._num_step_tokens += stop - start
        self._num_needed_tokens += max(0, stop - max(start, tracked.computed_len))
        tracked.computed_len = max(tracked.computed_len, stop)
        of_prompt = max(0, min(stop, tracked.prompt_len) - start)
        tracked.num_computed += of_prompt
        self._num_computed += of_prompt

    def answered(self, tracked: Tracked) -> None:
        """Count the reused prompt tokens of a request at its first answer."""
        tracked.num_reused = max(0, tracked.prompt_len - tracked.num_computed)
        self._num_reused += tracked.num_reused

    def preempted(self, num_requests: int) -> None:
        """Count preempted requests."""
        self._num_preemptions += num_requests

    def ended(self, reason: FinishReason, failed: bool) -> None:
        """Count an ended request. A cancelled request did not fail."""
        self._num_finished += not failed
        self._num_failed += failed and reason != "cancelled"
        self._num_cancelled += failed and reason == "cancelled"

    def stats(
        self, model: str, let_in: Iterable[Tracked], num_outside: int, num_waiting_for_kv: int, tables: BlockTables
    ) -> EngineStats:
        """The sums and the current state.

        Args:
            model: name of the model.
            let_in: admitted, unfinished requests.
            num_outside: requests that wait for admission.
            num_waiting_for_kv: admitted requests that wait for KV room.
            tables: the KV blocks.
        """
        running = [tracked.status is RequestStatus.RUNNING for tracked in let_in]
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
            free_blocks=tables.num_free_blocks,
            total_blocks=tables.total_blocks,
            cached_blocks=tables.num_cached_blocks,
            num_reused_tokens=self._num_reused,
            num_computed_tokens=self._num_computed,
            num_step_tokens=self._num_step_tokens,
            num_needed_tokens=self._num_needed_tokens,
            num_waiting_for_kv=num_waiting_for_kv,
            num_encoded_patches=self._num_encoded_patches,
            encode_s=self._encode_s,
        )
