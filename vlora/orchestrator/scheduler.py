"""Holds every request from arrival to its last word and turns the policy's decision into a `Batch` that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from vlora.errors import Aborted, DeadlineMissed, PromptTooLong
from vlora.memory.books import BlockTables
from vlora.orchestrator.cost import CostModel
from vlora.orchestrator.policy import Candidate, Decision, Policy, PolicyState
from vlora.orchestrator.tracked import Tracked
from vlora.types import (
    Batch,
    BatchItem,
    EngineStats,
    ErrorValue,
    FinishReason,
    HeadAnswer,
    MemoryView,
    Mode,
    Request,
    RequestOutput,
    RequestStatus,
    StepResult,
)


class Scheduler:
    """Decides each step: who runs, how many tokens each, in which mode, on which blocks.

    credit of a request = time waited since it last ran + estimated time of its next step + the switch it would need
    (V-LoRA section 4.4.3). A request whose credit exceeds theta starves.

    max_request_blocks: KV blocks that are always to be had for one request alone, whatever adapters are resident.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        tables: BlockTables,
        max_request_blocks: int,
        max_batch_size: int,
        max_step_tokens: int,
        theta_s: float,
        eos_ids: frozenset[int],
        cost: CostModel,
        clock: Callable[[], float],
    ) -> None:
        assert max_step_tokens >= max_batch_size >= 1
        self._policy = policy
        self._tables = tables
        self._max_request_blocks = max_request_blocks
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._theta_s = theta_s
        self._eos_ids = eos_ids
        self._cost = cost
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}  # in order of arrival
        self._arrivals = 0
        self._merged_adapter: str | None = None
        self._outputs: list[RequestOutput] = []
        self._num_steps = 0
        self._steps_by_mode: Counter[Mode] = Counter()
        self._requests_by_mode: Counter[Mode] = Counter()
        self._num_switches = 0
        self._switch_s = 0.0
        self._num_finished = 0
        self._num_failed = 0
        self._num_preemptions = 0

    # -- arrival and early ends -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Requests to run, or outputs to hand over."""
        return bool(self._tracked or self._outputs)

    def add(self, request: Request) -> None:
        """Take a request in. Raises PromptTooLong when its KV could not fit in memory even alone."""
        assert request.request_id not in self._tracked
        tracked = Tracked(request, self._arrivals, self._clock())
        needed = self._tables.blocks_for(tracked.max_len)
        if needed > self._max_request_blocks:
            raise PromptTooLong(
                f"prompt and answer together are up to {tracked.max_len} tokens, which take {needed} KV blocks of "
                f"{self._tables.block_size}; {self._max_request_blocks} are there for one request. Shorten the prompt, "
                "lower max_tokens, or start the engine with a larger arena_bytes"
            )
        self._arrivals += 1
        self._tracked[request.request_id] = tracked

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request as cancelled; None when it is unknown or already ended."""
        return self._end_early(request_id, "cancelled", ErrorValue.of(Aborted(f"request {request_id!r} was cancelled")))

    def fail(self, request_id: str, error: ErrorValue) -> RequestOutput | None:
        """End a request with an error; None when it is unknown or already ended."""
        return self._end_early(request_id, "error", error)

    def drain_outputs(self) -> tuple[RequestOutput, ...]:
        """Last words of requests that ended while scheduling (missed deadlines)."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    # -- what memory needs to know --------------------------------------------------------------------------------------

    def waiting_adapters(self) -> tuple[str, ...]:
        """Adapters that unfinished requests need, the longest waiting first."""
        now = self._clock()
        longest: dict[str, float] = {}
        for tracked in self._tracked.values():
            adapter = tracked.request.adapter
            if adapter is not None:
                longest[adapter] = max(longest.get(adapter, 0.0), now - tracked.last_ran_s)
        return tuple(sorted(longest, key=lambda adapter: -longest[adapter]))

    def adapters_in_use(self) -> frozenset[str]:
        """Adapters of requests that hold KV blocks."""
        holders = self._tables.holders
        return frozenset(
            tracked.request.adapter
            for request_id, tracked in self._tracked.items()
            if request_id in holders and tracked.request.adapter is not None
        )

    def stats(self, model: str) -> EngineStats:
        """Counters since the start."""
        running = sum(tracked.status is RequestStatus.RUNNING for tracked in self._tracked.values())
        return EngineStats(
            model=model,
            num_steps=self._num_steps,
            steps_by_mode={mode.value: count for mode, count in self._steps_by_mode.items()},
            requests_by_mode={mode.value: count for mode, count in self._requests_by_mode.items()},
            num_switches=self._num_switches,
            switch_s=self._switch_s,
            num_waiting=len(self._tracked) - running,
            num_running=running,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_preemptions=self._num_preemptions,
            free_blocks=self._tables.num_free_blocks,
            total_blocks=self._tables.total_blocks,
        )

    # -- decide -----------------------------------------------------------------------------------------------------------

    def schedule(self, view: MemoryView) -> Batch | None:
        """The next step's batch, or None when nobody can run."""
        now = self._clock()
        self._expire(now)
        ready = [
            tracked
            for tracked in self._tracked.values()
            if tracked.request.adapter is None or tracked.request.adapter in view.resident
        ]
        if not ready:
            return None
        decision = self._policy.decide(
            [Candidate(t.request.request_id, t.request.adapter, self._credit(t, now)) for t in ready],
            PolicyState(self._merged_adapter, view.mergeable, self._max_batch_size, self._theta(ready)),
        )
        order = [self._tracked[request_id] for request_id in decision.order]
        if decision.mode is Mode.MERGED:
            assert all(t.request.adapter == decision.merged_adapter for t in order), "merged mode serves one adapter"
        items, preempted = self._fit(order, self._share_tokens(order))
        if not items:
            return None
        mode, merged = _plain_mode(decision, items)
        return Batch(mode, merged, tuple(items), tuple(preempted))

    def _credit(self, tracked: Tracked, now: float) -> float:
        tokens = min(tracked.new_tokens, self._max_step_tokens)
        merged = tracked.request.adapter == self._merged_adapter
        lanes = 0 if tracked.request.adapter is None or merged else tokens
        step_s = self._cost.step_s(tokens, lanes, tracked.cached_len)
        return now - tracked.last_ran_s + step_s + (0.0 if merged else self._cost.switch_s)

    def _theta(self, ready: Iterable[Tracked]) -> float:
        """Never below two steps and switches: a threshold that every waiting request passes at once decides nothing."""
        tokens = min(sum(t.new_tokens for t in ready), self._max_step_tokens)
        return max(self._theta_s, 2 * (self._cost.step_s(tokens, tokens, 0) + self._cost.switch_s))

    def _share_tokens(self, order: list[Tracked]) -> dict[str, int]:
        """One token for every decoding request, the rest of the budget to prefills in the policy's order."""
        shares = {t.request.request_id: 1 for t in order if t.new_tokens == 1}
        left = self._max_step_tokens - len(shares)
        for tracked in order:
            if tracked.new_tokens > 1 and left > 0:
                shares[tracked.request.request_id] = min(tracked.new_tokens, left)
                left -= shares[tracked.request.request_id]
        return shares

    def _fit(self, order: list[Tracked], shares: dict[str, int]) -> tuple[list[BatchItem], list[str]]:
        """Find blocks for each share, most important first; take them back from others where they are short."""
        items: list[BatchItem] = []
        preempted: list[str] = []
        granted: set[str] = set()
        chosen = {t.request.request_id for t in order}
        for tracked in order:
            request_id = tracked.request.request_id
            if request_id not in shares or request_id in preempted:
                continue
            wanted = tracked.cached_len + shares[request_id]
            while not self._tables.grow(request_id, wanted):
                victim = self._victim(request_id, chosen, granted)
                if victim is None:
                    break
                self._tables.free(victim.request.request_id)
                victim.preempt()
                self._num_preemptions += 1
                preempted.append(victim.request.request_id)
            else:
                granted.add(request_id)
                items.append(
                    BatchItem(
                        request_id,
                        tracked.request.adapter,
                        tracked.cached_len,
                        shares[request_id],
                        self._tables.table(request_id),
                        wanted == tracked.device_len,
                    )
                )
        return items, preempted

    def _victim(self, request_id: str, chosen: set[str], granted: set[str]) -> Tracked | None:
        """Whose blocks to take: paused before chosen, newest arrival first, those preempted before only if nobody else."""
        holders = [
            self._tracked[holder] for holder in self._tables.holders if holder != request_id and holder not in granted
        ]
        if not holders:
            return None
        return min(holders, key=lambda t: (t.protected, t.request.request_id in chosen, -t.arrival))

    def _expire(self, now: float) -> None:
        for request_id, tracked in tuple(self._tracked.items()):
            bound = tracked.request.max_latency_s
            if bound is not None and now - tracked.arrival_s > bound:
                error = DeadlineMissed(
                    f"request {request_id!r} was not answered within its {bound:g} s; "
                    f"{tracked.num_sampled} tokens were done after {now - tracked.arrival_s:.3f} s"
                )
                output = self._end_early(request_id, "error", ErrorValue.of(error))
                assert output is not None
                self._outputs.append(output)

    # -- record -----------------------------------------------------------------------------------------------------------

    def record(self, batch: Batch, result: StepResult) -> tuple[RequestOutput, ...]:
        """Take a step's results in; returns what became known, with a finished output for every request that ended."""
        now = self._clock()
        self._count(batch, result)
        outputs: list[RequestOutput] = []
        for item in batch.items:
            tracked = self._tracked.get(item.request_id)
            if tracked is None:
                continue  # cancelled while the step ran
            if item.request_id in result.errors:
                outputs.append(self._end(tracked, "error", error=result.errors[item.request_id]))
                continue
            tracked.cached_len = item.start + item.num_tokens
            tracked.status = RequestStatus.RUNNING
            tracked.last_ran_s = now
            if tracked.first_run_s is None:
                tracked.first_run_s = now - result.step_s - result.switch_s
            if batch.mode not in tracked.steps_by_mode:
                self._requests_by_mode[batch.mode] += 1
            tracked.steps_by_mode[batch.mode] = tracked.steps_by_mode.get(batch.mode, 0) + 1
            if item.answers:
                outputs.append(self._answer(tracked, result, now))
        return tuple(outputs)

    def _answer(self, tracked: Tracked, result: StepResult, now: float) -> RequestOutput:
        request_id = tracked.request.request_id
        tracked.first_answer_s = tracked.first_answer_s or now
        tracked.protected = False
        if tracked.request.head is not None:
            return self._end(tracked, "head", head=result.heads[request_id])
        token = result.tokens[request_id]
        tracked.num_sampled += 1
        sampling = tracked.request.sampling
        if token in self._eos_ids and not sampling.ignore_eos:
            return self._end(tracked, "stop", tokens=(token,))
        if tracked.num_sampled >= sampling.max_tokens:
            return self._end(tracked, "length", tokens=(token,))
        return RequestOutput(request_id=request_id, token_ids=(token,))

    def _count(self, batch: Batch, result: StepResult) -> None:
        self._merged_adapter = batch.merged_adapter
        self._num_steps += 1
        self._steps_by_mode[batch.mode] += 1
        if result.switched:
            self._num_switches += 1
            self._switch_s += result.switch_s
            if batch.merged_adapter is not None:
                self._cost.observe_switch(result.switch_s)
        if result.step_s > 0 and not result.errors:
            lanes = sum(
                item.num_tokens for item in batch.items if item.adapter is not None and item.adapter != batch.merged_adapter
            )
            context = sum(item.start for item in batch.items)
            self._cost.observe_step(batch.num_tokens, lanes, context, result.step_s)

    def _end(
        self,
        tracked: Tracked,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        head: HeadAnswer | None = None,
        error: ErrorValue | None = None,
    ) -> RequestOutput:
        request_id = tracked.request.request_id
        del self._tracked[request_id]
        self._tables.free(request_id)
        failed = error is not None
        tracked.status = RequestStatus.FAILED if failed else RequestStatus.FINISHED
        self._num_failed += failed
        self._num_finished += not failed
        return RequestOutput(
            request_id=request_id,
            token_ids=tokens,
            head=head,
            finish_reason=reason,
            error=error,
            timings=tracked.timings(self._clock()),
        )

    def _end_early(self, request_id: str, reason: FinishReason, error: ErrorValue) -> RequestOutput | None:
        tracked = self._tracked.get(request_id)
        return None if tracked is None else self._end(tracked, reason, error=error)


def _plain_mode(decision: Decision, items: list[BatchItem]) -> tuple[Mode, str | None]:
    """Name what will really happen: mixed with only the merged adapter's requests is merged, mixed over W0 is unmerged."""
    if decision.mode is Mode.MIXED:
        if all(item.adapter == decision.merged_adapter for item in items):
            return Mode.MERGED, decision.merged_adapter
        if decision.merged_adapter is None:
            return Mode.UNMERGED, None
    return decision.mode, decision.merged_adapter
