"""The scheduler: tracks every request from arrival to its end and turns policy decisions into batches."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import msgspec

from vlora.errors import Aborted
from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.adapter_prefetch import MemoryDemand, ResidencyQuantum
from vlora.orchestrator.admission.request_queue import RequestQueue, deadline_missed, deadline_unreachable
from vlora.orchestrator.budgets import StepBudget, fit_budgets
from vlora.orchestrator.cost_model import CostModel, MergedAdapters
from vlora.orchestrator.credits import Credits
from vlora.orchestrator.encoder_budget import SHARE, ContentKey, EncodeQueue, encode_budget
from vlora.orchestrator.policies.base import Policy, PolicyState
from vlora.orchestrator.request_state import TrackedRequest, update_prefix_hits
from vlora.orchestrator.stats import Counters, WaitStats
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
    TokenScore,
)


@dataclasses.dataclass(kw_only=True, eq=False)
class Scheduler:
    """Decides each step: which requests run, with how many tokens, in which mode, on which blocks.

    The engine calls `admit`, `schedule`, `drain_outputs`, then `record` with the results of the step. Between steps it
    may add, cancel and fail requests. Every request ends with exactly one finished output, returned by one of these
    calls.

    Requests are admitted (`RequestQueue`) and then enter the KV room in order (`KvAdmission`); policies select entered
    requests only. An admitted request is never refused. A request without KV never takes blocks from a running one,
    unless it is the oldest ready one.

    A request starves when its credit is above theta (`Credits`). The waiting bound, theta + ceil(ready / MaxBS) *
    longest step, holds for entered requests with a resident adapter, from entry to the first step and from step to
    step, regardless of priority: priority and fair shares order the requests that do not starve. A preempted request
    leaves the KV room. It enters again before all new requests, and the bound holds from then on. The wait for KV room
    has no bound in seconds, but the order of entry lets no request wait forever.

    Args:
        max_request_blocks: KV blocks available to a single request, whatever adapters are resident.
        theta_s: the credit in seconds above which a request starves; a lower limit, see `Credits.theta`.
        clock: current time in seconds.
        weights: fair shares between adapters, see `FairShares`; not applied if empty.
        tenant_weights: fair shares between tenants, which precede those between adapters; not applied if empty.
        placeholders: see `EncodeQueue`. A request runs once its images are encoded.
        encode_share: encoding extends a step with tokens by at most this share of their time, plus half a piece of an
            image.

    Attributes:
        budget: max_batch_size and max_step_tokens; may be changed between steps.
        demand: the adapters and KV blocks that they need.
        waits: the longest wait; may be replaced, to measure a period.
    """

    policy: Policy
    block_manager: BlockManager
    max_request_blocks: int
    max_batch_size: dataclasses.InitVar[int]
    max_step_tokens: dataclasses.InitVar[int]
    theta_s: float
    eos_ids: frozenset[int]
    cost: CostModel
    clock: Callable[[], float]
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    placeholders: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_cached: Callable[[ContentKey], bool] = lambda key: False
    encode_share: float = SHARE

    def __post_init__(self, max_batch_size: int, max_step_tokens: int) -> None:
        self.budget = StepBudget(max_batch_size, max_step_tokens)
        self.waits = WaitStats(max_batch_size)
        self._encoding = EncodeQueue(self.placeholders, self.is_cached, max_step_tokens)
        self.queue = RequestQueue(
            self.block_manager,
            self.max_request_blocks,
            self.budget,
            self.cost,
            self._encoding,
            self.encode_share,
            self.weights,
            self.tenant_weights,
        )
        self._credits = Credits(self.cost, self.budget, self._encoding, self.theta_s, self.encode_share)
        self._quantum = ResidencyQuantum()
        self.demand = MemoryDemand(
            self.queue, self.budget, self._credits, self._encoding, self.block_manager, self._quantum, self.clock
        )
        self._carried: Any = None
        self._advanced: list[tuple[TrackedRequest, BatchItem]] = []
        self._outputs: list[RequestOutput] = []
        self._counters = Counters()

    # -- the step -----------------------------------------------------------------------------------------------------

    def schedule(self, view: MemoryView) -> Batch | None:
        """The next step's batch of tokens, images to encode, or both; None if nothing can be computed."""
        now = self.clock()
        self._fail_late(now)
        requests = self.queue.admitted.values()
        update_prefix_hits(requests, self.block_manager)
        self.queue.enter(now)
        self._quantum.observe(view, now)
        merged = self._credits.merged.among(view.resident)

        entered = [t for t in requests if t.entered]
        # Entered requests only: embeddings held for a request without KV room could block entered ones.
        to_encode = [t for t in entered if not self._encoding.is_ready(t)]
        entered = [t for t in entered if not t.num_holds]
        ready = [t for t in entered if t.needed in view.resident or t.needed is None]
        if to_encode:
            waiting_for_images = set(to_encode)
            ready = [t for t in ready if t not in waiting_for_images]

        batch = None
        if ready:
            theta_s = self._credits.theta(ready, merged.in_place, requests)
            self.waits.record_decision(theta_s, len(ready))
            candidates = self._credits.candidates(self.queue.in_order(ready), now, merged.in_place, theta_s)
            decision = self.policy.decide(candidates, self._policy_state(view, merged, theta_s))
            assert len(decision.order) <= self.budget.max_batch_size, (
                "the policy chose more requests than a batch takes"
            )
            self._carried = decision.carried
            self.queue.adapter_starves = len(ready) < len(entered) and self._starve_for_memory(
                entered, view, now, merged.in_place, theta_s
            )
            starving = {c.request_id for c in candidates if c.credit > theta_s}
            batch = fit_budgets(decision, starving, ready, self.queue.admitted, self.block_manager, self.budget)
            if batch is not None:
                self._start(batch, now)
        return self._add_images(batch, to_encode, view.resident, now, merged.in_place) if to_encode else batch

    def record(self, batch: Batch, result: StepResult) -> tuple[RequestOutput, ...]:
        """Record a step's results; return new outputs, with a finished one for every request that ended."""
        self.advance(batch)
        return self.finish(batch, result)

    def advance(self, batch: Batch) -> None:
        """The first part of `record`, before the results are known. The next step may be scheduled after it."""
        now = self.clock()
        self._advanced = []
        for item in batch.items:
            tracked = self.queue.admitted.get(item.request_id)
            if tracked is None:
                continue  # ended after the step was scheduled
            self._advanced.append((tracked, item))
            self.queue.count_service(tracked, item.num_tokens)
            tracked.set_cached_len(item.start + item.num_tokens)
            tracked.last_ran_s = now
            if item.answers and not tracked.is_head:
                tracked.device_len += 1
                tracked.num_holds = int(tracked.device_len == tracked.max_len)

    def finish(self, batch: Batch, result: StepResult) -> tuple[RequestOutput, ...]:
        """The second part of `record`. Before it, no other step is advanced."""
        now = self.clock()
        late_s = self.cost.observe(batch, result, self._credits.merged)
        self._counters.count_step(batch, result, late_s)
        self.waits.record_step(result.step_s + result.switch_s)
        self._credits.merged = self._credits.merged.after(batch, result)
        outputs = self._record_images(batch, result, now)
        for tracked, item in self._advanced:
            if tracked.has_ended:
                continue  # cancelled while the step ran
            self._counters.count_request_step(tracked, batch.mode)
            if item.request_id in result.errors:
                outputs.append(self._end(tracked, "error", now, error=result.errors[item.request_id]))
                continue
            self._record_kv(tracked, item)
            if item.answers:
                outputs.append(self._record_answer(tracked, result, now))
        return tuple(outputs)

    # -- arrival and early ends ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished requests or undelivered outputs."""
        return bool(self.queue or self._outputs)

    def add(self, request: Request, *, num_holds: int = 0, vision_key: str | None = None) -> None:
        """Add a request.

        Args:
            num_holds: do not run it before so many calls of `release`.
            vision_key: the key of its adapter, if that adapter changes the vision side.

        Raises:
            PromptTooLong: its KV would not fit in memory even alone.
        """
        self.queue.add(request, self.clock(), num_holds=num_holds, vision_key=vision_key)

    def release(self, request_id: str) -> None:
        """Let a held request run, after the last hold; ids of requests that have ended are ignored."""
        tracked = self.queue.get(request_id)
        if tracked is not None:
            tracked.num_holds -= 1

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request as cancelled; None if it is unknown or has ended."""
        return self._end_early(request_id, "cancelled", ErrorValue.of(Aborted(f"request {request_id!r} was cancelled")))

    def fail(self, request_id: str, error: ErrorValue) -> RequestOutput | None:
        """End a request with an error; None if it is unknown or has ended."""
        return self._end_early(request_id, "error", error)

    def admit(self, resident: Set[str]) -> None:
        """Admit or refuse waiting requests, before adapters are loaded, so that none is loaded for a refused one."""
        now = self.clock()
        self._fail_late(now)
        for tracked, needed_s in self.queue.decide_admission(now, resident):
            self._outputs.append(self._end(tracked, "error", now, error=deadline_unreachable(tracked, needed_s, now)))
        self.queue.enter(now)

    def drain_outputs(self) -> tuple[RequestOutput, ...]:
        """Outputs of requests that ended in `admit` or `schedule` (deadline missed or unreachable)."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    # -- state --------------------------------------------------------------------------------------------------------

    def by_credit(self, most: int) -> list[tuple[TrackedRequest, float]]:
        """At most `most` admitted requests with their credit, highest credit first."""
        tracked = tuple(self.queue.admitted.values())
        credits = self._credits.current(tracked, self.clock())
        return heapq.nlargest(most, zip(tracked, credits, strict=True), key=lambda pair: pair[1])

    def stats(self, model: str) -> EngineStats:
        requests = self.queue.admitted.values()
        stats = self._counters.stats(model, requests, len(self.queue.outside), len(self.queue.kv), self.block_manager)
        credits = self._credits.current(requests, self.clock())
        return msgspec.structs.replace(stats, highest_credit_s=max(credits, default=0.0))

    def check_integrity(self) -> None:
        """Assert the invariants of the requests and their blocks."""
        self.queue.check_integrity()

    # -- parts of `schedule` ------------------------------------------------------------------------------------------

    def _fail_late(self, now: float) -> None:
        for tracked in self.queue.deadlines.missed(now):
            self._outputs.append(self._end(tracked, "error", now, error=deadline_missed(tracked, now)))

    def _policy_state(self, view: MemoryView, merged: MergedAdapters, theta_s: float) -> PolicyState:
        return PolicyState(
            merged.in_place,
            view.mergeable,
            self.budget.max_batch_size,
            theta_s,
            merged.shadow,
            self.budget.max_step_tokens,
            self.cost.costs,
            self._carried,
        )

    def _starve_for_memory(
        self, entered: Sequence[TrackedRequest], view: MemoryView, now: float, merged: str | None, theta_s: float
    ) -> bool:
        """Whether a request starves for an adapter that is neither in memory nor being loaded."""
        present = view.resident | view.loading
        waiting = [t for t in entered if t.needed is not None and t.needed not in present]
        return any(credit > theta_s for credit in self._credits.of(waiting, now, merged))

    def _start(self, batch: Batch, now: float) -> None:
        """Record that the requests of a batch run, and that others were preempted for them."""
        self._counters.num_preemptions += len(batch.preempted)
        self.queue.requeue(batch.preempted)
        for item in batch.items:
            tracked = self.queue.admitted[item.request_id]
            tracked.status = RequestStatus.RUNNING
            self._encoding.mark_started(tracked, item.start)
            self.waits.record_wait(now - tracked.last_ran_s)
            if tracked.first_run_s is None:
                tracked.first_run_s = now

    def _add_images(
        self,
        batch: Batch | None,
        to_encode: Sequence[TrackedRequest],
        resident: Set[str],
        now: float,
        merged: str | None,
    ) -> Batch | None:
        # As with tokens: requests that waited longer than theta come first, then priority and fair shares.
        order = list(self.queue.in_order(to_encode))
        order.sort(key=lambda t: min(0.0, self.theta_s - (now - t.last_ran_s)))
        budget = encode_budget(batch, self.cost.costs, self.encode_share)
        encode = self._encoding.choose(order, resident, budget, alone=batch is None)
        if encode is None:
            return batch
        if batch is None:
            batch = Batch(Mode.UNMERGED if merged is None else Mode.MERGED, merged, ())
        return msgspec.structs.replace(batch, encode=encode)

    # -- parts of `record` --------------------------------------------------------------------------------------------

    def _record_images(self, batch: Batch, result: StepResult, now: float) -> list[RequestOutput]:
        if batch.encode is None or result.encoded is None:
            return []  # no images, or the step failed before encoding
        outputs: list[RequestOutput] = []
        for tracked in self._encoding.record(batch.encode, result.encoded):
            if tracked.first_run_s is None:
                tracked.first_run_s = now
            tracked.last_ran_s = now
            if tracked.request_id in result.errors:
                outputs.append(self._end(tracked, "error", now, error=result.errors[tracked.request_id]))
        return outputs

    def _record_kv(self, tracked: TrackedRequest, item: BatchItem) -> None:
        """Record newly computed KV. Not called for failed items, so their blocks never become known."""
        stop = item.start + item.num_tokens
        self._counters.count_computed(tracked, item.start, stop)
        if tracked.chain is not None:
            self.block_manager.register_full_blocks(item.request_id, tracked.chain, item.start, stop)

    def _record_answer(self, tracked: TrackedRequest, result: StepResult, now: float) -> RequestOutput:
        if tracked.first_answer_s is None:
            tracked.first_answer_s = now
            self._counters.count_first_answer(tracked)
            self.queue.outside.observe(tracked, now - tracked.admitted_s)
        tracked.protected = False
        tracked.last_answer_s = now
        if tracked.is_head:
            return self._end(tracked, "head", now, head=result.heads[tracked.request_id])
        token = result.tokens[tracked.request_id]
        scores = (result.scores[tracked.request_id],) if tracked.request_id in result.scores else ()
        tracked.append(token)
        sampling = tracked.request.sampling
        stopped = token in self.eos_ids and not sampling.ignore_eos
        if stopped or tracked.num_sampled >= sampling.max_tokens:
            self.queue.kv.lengths.observe(tracked.num_sampled, sampling.max_tokens)
            return self._end(tracked, "stop" if stopped else "length", now, tokens=(token,), scores=scores)
        return RequestOutput(request_id=tracked.request_id, token_ids=(token,), scores=scores)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(
        self,
        tracked: TrackedRequest,
        reason: FinishReason,
        now: float,
        *,
        tokens: tuple[int, ...] = (),
        scores: tuple[TokenScore, ...] = (),
        head: HeadAnswer | None = None,
        error: ErrorValue | None = None,
    ) -> RequestOutput:
        if error is None and now > tracked.end_by:  # max_latency_s limits the whole request: a late answer is an error
            reason, head, error = "error", None, deadline_missed(tracked, now)
        tracked.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.queue.remove(tracked)
        self.block_manager.free(tracked.request_id)
        self._counters.count_ended(reason, failed=error is not None)
        return RequestOutput(
            request_id=tracked.request_id,
            token_ids=tokens,
            scores=scores,
            head=head,
            finish_reason=reason,
            error=error,
            timings=tracked.timings(now),
        )

    def _end_early(self, request_id: str, reason: FinishReason, error: ErrorValue) -> RequestOutput | None:
        tracked = self.queue.get(request_id)
        return None if tracked is None else self._end(tracked, reason, self.clock(), error=error)
