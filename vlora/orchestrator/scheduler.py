"""The scheduler: tracks every request from arrival to its end and turns policy decisions into batches."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from vlora.errors import Aborted, DeadlineMissed, DeadlineUnreachable, PromptTooLong
from vlora.memory.books import BlockTables
from vlora.orchestrator.admission import Admission, Load
from vlora.orchestrator.budgets import grant_blocks, share_tokens
from vlora.orchestrator.cost_model import CostModel, Costs, StepSize, num_lanes
from vlora.orchestrator.encoder_budget import ALONE_S, SHARE, ContentKey, EncodeQueue
from vlora.orchestrator.fairness import FairShares, adapter_of, in_turn, tenant_of
from vlora.orchestrator.kv_admission import KvAdmission
from vlora.orchestrator.policies.base import Candidate, Decision, Policy, PolicyState
from vlora.orchestrator.request_state import Tracked
from vlora.orchestrator.residency_quantum import Stays
from vlora.orchestrator.reuse import look_up
from vlora.orchestrator.stats import Counters
from vlora.orchestrator.waits import Waits
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

_MORE_ADAPTERS = 1 / 256  # per step: adapters differ in size, and some are unloaded
_FEW_ENDED = 8  # ended requests kept, with their images, in the heap of deadlines


class Scheduler:
    """Decides each step: which requests run, with how many tokens, in which mode, on which blocks.

    credit of a request = time waited since it last ran + estimated time of its next step with the weights now in place
    + the switch needed to leave another adapter's merged weights (V-LoRA section 4.4.3). A request with credit above
    theta starves.

    The engine calls `admit`, `schedule`, `drain_outputs`, then `record` with the results of the step. Between steps it
    may add, cancel and fail requests. Every request ends with exactly one finished output, returned by one of these
    calls.

    A request with a deadline on its first answer waits outside until `admit` admits or refuses it; all others are
    admitted on arrival. An admitted request is never refused. It then enters the KV room in order (`KvAdmission`), and
    policies select entered requests only. A request without KV never takes blocks from a running one, unless it is the
    oldest ready one.

    The waiting bound, theta + ceil(ready / MaxBS) * longest step, holds for entered requests with a resident adapter,
    from entry to the first step and from step to step, regardless of priority: priority and fair shares order the
    requests that do not starve. A preempted request leaves the KV room. It enters again before all new requests, and
    the bound holds from then on. The wait for KV room has no bound in seconds, but the order of entry lets no request
    wait forever.

    With fair shares between tenants, all requests wait outside until there is room: starving requests come first among
    the admitted ones, so many requests of one tenant would starve together and dominate the batch.

    Args:
        policy: decides mode and order.
        tables: the KV blocks.
        max_request_blocks: KV blocks available to a single request, whatever adapters are resident.
        max_batch_size: requests per batch.
        max_step_tokens: tokens per batch.
        theta_s: the credit in seconds above which a request starves; a lower limit, see `_theta`.
        eos_ids: end tokens.
        cost: learns and predicts step times.
        clock: current time in seconds.
        weights: fair shares between adapters, see `FairShares`; not applied if empty.
        tenant_weights: fair shares between tenants, which precede those between adapters; not applied if empty.
        placeholders: see `EncodeQueue`. A request runs once its images are encoded.
        is_cached: see `EncodeQueue`.
        encode_share: encoding extends a step with tokens by at most this share of their time, plus half a piece of an
            image.
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
        weights: Mapping[str, float] | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        placeholders: Mapping[str, int] | None = None,
        is_cached: Callable[[ContentKey], bool] = lambda key: False,
        encode_share: float = SHARE,
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
        self._shares = [
            FairShares(given, name_of)
            for given, name_of in ((weights, adapter_of), (tenant_weights, tenant_of))
            if given
        ]
        self._admission = Admission(self._shares)
        self._kv_admission = KvAdmission(tables, max_request_blocks, self._shares)
        self._all_wait_outside = bool(tenant_weights)
        self._tracked: dict[str, Tracked] = {}  # admitted requests, in order of arrival
        self._arrivals = itertools.count()
        self._num_of: Counter[str] = Counter()  # entered requests, by adapter
        self._bounds: list[tuple[float, int, Tracked]] = []  # heap of (latest time, unique number, request)
        self._num_bounds = itertools.count()
        self._judged_s = -math.inf  # time of the last admission decision
        self._most_adapters = math.inf
        self._merged_adapter: str | None = None
        self._shadow_adapter: str | None = None  # merged last: its weights are available
        self._carried: Any = None
        self._encode_share = encode_share
        self._encoding = EncodeQueue(placeholders or {}, is_cached, max_step_tokens)
        self._starved_of_adapter = False
        self._stays = Stays()
        self._outputs: list[RequestOutput] = []
        self._counters = Counters()
        self.waits = Waits(max_batch_size)

    # -- arrival and early ends ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished requests or undelivered outputs."""
        return bool(self._tracked or self._outputs or self._admission)

    def add(self, request: Request, *, held: bool = False, vision_key: str | None = None) -> None:
        """Add a request.

        Args:
            request: the request.
            held: do not run it before `release`.
            vision_key: the key of its adapter, if that adapter changes the vision side.

        Raises:
            PromptTooLong: its KV would not fit in memory even alone.
        """
        assert self._find(request.request_id) is None
        now = self._clock()
        tracked = Tracked(request, now, self._tables.chain(request))
        tracked.held = held
        needed = self._tables.blocks_for(tracked.max_len)
        if needed > self._max_request_blocks:
            raise PromptTooLong(
                f"prompt and max_tokens require {tracked.max_len} tokens, or {needed} KV blocks of "
                f"{self._tables.block_size} tokens; {self._max_request_blocks} blocks are available to one request. "
                "Shorten the prompt, lower max_tokens, or start the engine with a larger arena_bytes"
            )
        self._encoding.add(tracked, vision_key)
        for shares in self._shares:
            shares.arrived(tracked)
        if request.max_latency_s is not None:
            heapq.heappush(self._bounds, (now + request.max_latency_s, next(self._num_bounds), tracked))
        if tracked.answer_by is None and not self._all_wait_outside:
            self._let_in(tracked, now)
        else:
            self._admission.add(tracked)

    def release(self, request_id: str) -> None:
        """Allow a held request to run."""
        tracked = self._find(request_id)
        assert tracked is not None
        tracked.held = False

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request as cancelled; None if it is unknown or has ended."""
        return self._end_early(request_id, "cancelled", ErrorValue.of(Aborted(f"request {request_id!r} was cancelled")))

    def fail(self, request_id: str, error: ErrorValue) -> RequestOutput | None:
        """End a request with an error; None if it is unknown or has ended."""
        return self._end_early(request_id, "error", error)

    def drain_outputs(self) -> tuple[RequestOutput, ...]:
        """Outputs of requests that ended in `admit` or `schedule` (deadline missed or unreachable)."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    # -- memory demand ------------------------------------------------------------------------------------------------

    @property
    def needed_adapters(self) -> Set[str]:
        """Adapters that entered requests need.

        Adapters of requests that wait for admission or KV room are excluded: they would take pages that entered
        requests are expected to need.
        """
        return self._num_of.keys()

    def adapters_outside(self) -> Set[str]:
        """Adapters of requests that wait for KV room, then for admission, each in order of arrival."""
        waiting = itertools.chain(self._kv_admission.waiting, self._admission.waiting)
        return dict.fromkeys(t.adapter for t in waiting if t.adapter is not None).keys()

    def waiting_adapters(self) -> tuple[str, ...]:
        """The needed adapters in descending order of their requests' highest credit."""
        highest: dict[str, float] = {}
        tracked = [t for t in self._tracked.values() if t.adapter is not None and t.entered]
        for t, credit in zip(tracked, self._credits(tracked, self._clock(), self._merged_adapter), strict=True):
            assert t.adapter is not None
            if credit > highest.get(t.adapter, -1.0):
                highest[t.adapter] = credit
        return tuple(sorted(highest, key=lambda adapter: -highest[adapter]))

    def by_credit(self, most: int) -> list[tuple[Tracked, float]]:
        """At most `most` admitted requests with their credit, highest credit first."""
        tracked = tuple(self._tracked.values())
        credits = self._credits(tracked, self._clock(), self._merged_adapter)
        return heapq.nlargest(most, zip(tracked, credits, strict=True), key=lambda pair: pair[1])

    def blocks_short(self) -> int:
        """Additional free KV blocks that the next step needs.

        Assumes that the step runs all running requests and, beside them, the oldest entered requests that have not
        started. Prefix-cache hits of the latter are not counted, because other requests may already use these blocks.
        """
        most = self._tables.blocks_for(self._max_step_tokens) + self._max_batch_size  # each may start one more block
        if most <= self._tables.num_free_blocks:
            return 0
        under_way = [t for t in self._tracked.values() if t.status is RequestStatus.RUNNING]
        waiting = (t for t in self._tracked.values() if t.entered and t.status is RequestStatus.WAITING)
        left, wanted = self._max_step_tokens, 0
        for tracked in itertools.islice(itertools.chain(under_way, waiting), self._max_batch_size):
            tokens = min(tracked.new_tokens, left)
            left -= tokens
            if tokens:
                held = len(self._tables.table(tracked.request_id)) or self._tables.blocks_for(tracked.cached_len)
                wanted += max(0, self._tables.blocks_for(tracked.cached_len + tokens) - held)
        return max(0, wanted - self._tables.num_free_blocks)

    def blocks_short_to_enter(self) -> int:
        """Additional free KV blocks that the next request needs to enter; 0 if none waits for room."""
        return self._kv_admission.blocks_short

    def adapters_in_use(self) -> frozenset[str]:
        """Adapters that must stay resident.

        Evicting one stalls requests that hold KV blocks, or discards images that are partially encoded. While a request
        starves for an adapter that does not fit, only two kinds must stay: adapters within their residency quantum, and
        those of requests that were preempted and have not produced a token since. The other requests keep their KV and
        wait in turn.
        """
        now = self._clock()
        holders = (self._tracked[holder] for holder in self._tables.holders)
        held = frozenset(
            tracked.adapter
            for tracked in holders
            if tracked.adapter is not None
            and (tracked.protected or not self._starved_of_adapter or not self._stays.is_over(tracked.adapter, now))
        )
        return held | self._encoding.adapters_under_way

    def stats(self, model: str) -> EngineStats:
        """Counters since the start, and the current state."""
        stats = self._counters.stats(
            model, self._tracked.values(), len(self._admission), len(self._kv_admission), self._tables
        )
        credits = self._credits(self._tracked.values(), self._clock(), self._merged_adapter)
        return msgspec.structs.replace(stats, highest_credit_s=max(credits, default=0.0))

    def check_integrity(self) -> None:
        """Assert the invariants of the requests and their blocks.

        Lengths are in order, exactly the running requests hold blocks, each holds enough of them, and no request can
        write to a block that another may read.
        """
        for tracked in self._tracked.values():
            tracked.check_integrity()
            assert tracked.entered != (tracked.request_id in self._kv_admission), f"{tracked.request_id} is misplaced"
            held = len(self._tables.table(tracked.request_id))
            running = tracked.status is RequestStatus.RUNNING
            assert bool(held) == running, f"{tracked.request_id} holds {held} blocks"
            assert not running or held >= self._tables.blocks_for(tracked.cached_len), (
                f"{tracked.request_id} lacks blocks"
            )
            assert self._tables.writable(tracked.request_id, tracked.cached_len), (
                f"{tracked.request_id} would write to known blocks"
            )
        assert self._tables.holders <= self._tracked.keys(), "an ended request still holds blocks"
        outside = [tracked.request_id for tracked in self._admission.waiting]
        self._encoding.check_integrity({*self._tracked, *outside})

    # -- decide -------------------------------------------------------------------------------------------------------

    def admit(self, resident: Set[str]) -> None:
        """Admit or refuse waiting requests. Call before loading adapters, so that none is loaded for a refused request.

        Args:
            resident: adapters in memory or being loaded.
        """
        now = self._clock()
        self._expire(now)
        self._judge(now, resident)
        self._enter(now)

    def _judge(self, now: float, resident: Set[str]) -> None:
        if not self._admission:
            self._admission.rest()
            return
        look_up(self._admission.waiting, self._tables)
        # Requests without a deadline enter after those with one, so they do not delay the latter while waiting for KV
        # room.
        accepted = tuple(t for t in self._tracked.values() if t.entered or t.answer_by is not None)
        load = Load(
            accepted,
            self._cost.costs,
            max_batch_size=self._max_batch_size,
            max_step_tokens=self._max_step_tokens,
            block_size=self._tables.block_size,
            free_blocks=self._kv_admission.free_blocks(accepted),
            resident=resident,
            most_adapters=self._most_adapters_in(resident),
            all_wait_outside=self._all_wait_outside,
            patches_left=self._encoding.patches_left,
            encode_share=self._encode_share,
        )
        self._judged_s = now
        verdict = self._admission.judge(now, load)
        for tracked in verdict.let_in:
            self._let_in(tracked, now)
        for tracked, needed_s in verdict.refused:
            self._outputs.append(self._end(tracked, "error", now, error=_unreachable(tracked, needed_s, now)))

    def _most_adapters_in(self, resident: Set[str]) -> float:
        """Estimated number of adapters that memory holds.

        The number resident when an adapter last failed to load, growing slowly to retry with more. Infinite while no
        load has failed.
        """
        needed = (t for t in self._tracked.values() if t.adapter and t.entered)
        if any(t.adapter not in resident and t.let_in_s <= self._judged_s for t in needed):
            self._most_adapters = len(resident)
        else:
            self._most_adapters = max(self._most_adapters + _MORE_ADAPTERS, len(resident))
        return self._most_adapters

    def _let_in(self, tracked: Tracked, now: float) -> None:
        tracked.let_in(next(self._arrivals), now)
        self._tracked[tracked.request_id] = tracked
        self._kv_admission.add(tracked)

    def _enter(self, now: float) -> None:
        """Enter requests as far as there is KV room."""
        tracked = self._tracked.values()
        for t in self._kv_admission.admit(now, tracked, adapter_starves=self._starved_of_adapter):
            if t.adapter is not None:
                self._num_of[t.adapter] += 1

    def _leave(self, tracked: Tracked) -> None:
        """Release a request's need for its adapter, finally or until it enters again."""
        if tracked.adapter is not None:
            self._num_of[tracked.adapter] -= 1
            if not self._num_of[tracked.adapter]:
                del self._num_of[tracked.adapter]

    def schedule(self, view: MemoryView) -> Batch | None:
        """The next step's batch of tokens, images to encode, or both; None if nothing can be computed."""
        now = self._clock()
        self._expire(now)
        look_up(self._tracked.values(), self._tables)
        self._enter(now)
        resident = view.resident
        self._stays.see(view, now)
        entered = [t for t in self._tracked.values() if t.entered]
        # Entered requests only: embeddings held for a request without KV room could block entered ones.
        unseen = [t for t in entered if not self._encoding.is_ready(t)]
        entered = [t for t in entered if not t.held]
        ready = [t for t in entered if t.adapter in resident or t.adapter is None]
        if unseen:
            waiting_for_images = set(unseen)
            ready = [t for t in ready if t not in waiting_for_images]
        # Merged weights are invalid once their adapter is evicted.
        merged = self._merged_adapter if self._merged_adapter in resident else None
        batch = self._batch_of(ready, entered, view, now, merged) if ready else None
        return self._with_images(batch, unseen, resident, now, merged) if unseen else batch

    def _batch_of(
        self, ready: Sequence[Tracked], entered: Sequence[Tracked], view: MemoryView, now: float, merged: str | None
    ) -> Batch:
        resident = view.resident
        shadow = self._shadow_adapter if self._shadow_adapter in resident else None
        costs = self._cost.costs
        theta_s = self._theta(ready, merged, costs)
        self.waits.decided(theta_s, len(ready))
        candidates = self._candidates(in_turn(ready, self._shares), now, merged, theta_s)
        decision = self._policy.decide(
            candidates,
            PolicyState(
                merged,
                view.mergeable,
                self._max_batch_size,
                theta_s,
                shadow,
                self._max_step_tokens,
                costs,
                self._carried,
            ),
        )
        assert len(decision.order) <= self._max_batch_size, "the policy chose more requests than a batch takes"
        self._carried = decision.carried
        starving = {c.request_id for c in candidates if c.credit > theta_s}
        roomless: Sequence[Tracked] = ()
        if len(ready) < len(entered):
            elsewhere = resident | view.loading
            roomless = [t for t in entered if t.adapter is not None and t.adapter not in elsewhere]
        self._starved_of_adapter = any(credit > theta_s for credit in self._credits(roomless, now, merged))
        batch = self._fit(decision, starving, ready, now)
        if batch is None:
            # All selected requests wait for blocks of requests that may not be preempted. The oldest can always run.
            oldest = tuple(t.request_id for t in ready[: self._max_batch_size])
            batch = self._fit(Decision(Mode.UNMERGED, None, oldest), starving, ready, now)
            assert batch is not None, "the oldest request was admitted but does not fit"
        return batch

    def _with_images(
        self, batch: Batch | None, unseen: Sequence[Tracked], resident: Set[str], now: float, merged: str | None
    ) -> Batch | None:
        """The batch with the images that can be encoded beside it."""
        costs = self._cost.costs
        share = self._encode_share
        seconds = share * costs.step_s(StepSize.of(batch)) if batch is not None else ALONE_S
        budget = max(1.0, seconds / costs.patch_s) if costs.patch_s else 1.0  # until a cost was measured
        # As with tokens: requests that waited longer than theta come first, then priority and fair shares.
        turn = list(in_turn(unseen, self._shares))
        turn.sort(key=lambda t: min(0.0, self._theta_s - (now - t.last_ran_s)))
        encode = self._encoding.choose(turn, resident, budget, alone=batch is None)
        if encode is None:
            return batch
        if batch is None:
            batch = Batch(Mode.UNMERGED if merged is None else Mode.MERGED, merged, ())
        return msgspec.structs.replace(batch, encode=encode)

    def _candidates(self, ready: Sequence[Tracked], now: float, merged: str | None, theta_s: float) -> list[Candidate]:
        credits = self._credits(ready, now, merged)
        candidates = [
            Candidate(
                t.request_id,
                t.adapter,
                credit,
                t.device_len - t.cached_len,
                t.cached_len,
                t.is_head,
                False,
                now - t.last_ran_s,
                now - t.last_answer_s,
            )
            for t, credit in zip(ready, credits, strict=True)
        ]
        # Urgent requests rank behind all that starve by waiting, so that they do not affect the waiting bound.
        starves = math.nextafter(theta_s, math.inf)
        for place, t in enumerate(ready):
            if t.answer_by is None or t.first_answer_s is not None:
                continue
            if t.last_ran_s + credits[place] + theta_s >= t.answer_by:
                candidates[place] = candidates[place]._replace(urgent=True, credit=max(credits[place], starves))
        return candidates

    def _credits(self, requests: Iterable[Tracked], now: float, merged: str | None) -> list[float]:
        costs, limit = self._cost.costs, self._max_step_tokens
        # The step's fixed cost and cost per token, by number of lanes, for short and long lanes. Precomputed, since
        # this loop runs for every request in every step.
        prices, short = ((costs.lane_s, costs.adapter_s), (costs.long_lane_s, costs.long_adapter_s)), costs.short_lane
        lanes = [
            [(costs.base_s + n * adapter_s, costs.token_s + n * lane_s) for lane_s, adapter_s in prices]
            for n in range(3)
        ]
        context_s, merge_s = costs.context_token_s, 0.0 if merged is None else costs.merge_s
        patch_s = costs.patch_s
        own, base, other = lanes[0], lanes[num_lanes(None, merged)], lanes[1 if merged is None else 2]
        base, other = ([(fixed_s + merge_s, token_s) for fixed_s, token_s in each] for each in (base, other))
        credits: list[float] = []
        for t in requests:
            adapter, cached = t.adapter, t.cached_len
            tokens = t.device_len - cached
            if tokens > limit:
                tokens = limit
            fixed_s, token_s = (own if adapter == merged else base if adapter is None else other)[tokens > short]
            own_s = fixed_s + token_s * tokens + context_s * cached
            if t.images:
                own_s += patch_s * self._encoding.patches_left(t)
            credits.append(now - t.last_ran_s + own_s)
        return credits

    def _theta(self, ready: Sequence[Tracked], merged: str | None, costs: Costs) -> float:
        """The effective theta: the setting, but at least the longest possible time for one round and one more step.

        A round serves every ready request once, in steps as long as these requests could make them, switch included.
        Their lanes count as equally long. If waiting for a turn alone exceeded the threshold, all requests would
        starve.
        """
        most = self._max_batch_size
        tokens = min(sum(sorted([t.device_len - t.cached_len for t in ready])[-most:]), self._max_step_tokens)
        context = sum(sorted([t.cached_len for t in ready], reverse=True)[:most])
        lanes = min(len({t.adapter for t in ready}), most)
        branch_s = 0.0 if merged is None else costs.lanes_s(tokens)
        step_s = costs.merged_s(tokens, context) + costs.lanes_s(tokens, lanes) + branch_s
        if len(ready) < len(self._tracked) and any(t.images for t in self._tracked.values()):
            step_s *= 1 + min(self._encode_share, SHARE)  # images may be encoded beside it
        num_rounds = -(-len(ready) // most)
        return max(self._theta_s, (1 + num_rounds) * (step_s + costs.merge_s))

    def _fit(self, decision: Decision, starving: set[str], ready: Sequence[Tracked], now: float) -> Batch | None:
        """Apply the token and block budgets to the decision; None, with nothing changed, if no request fits."""
        order = [self._tracked[request_id] for request_id in decision.order]
        merged = decision.merged_adapter
        if decision.mode is Mode.MERGED:
            assert all(t.adapter == merged for t in order), "merged mode serves one adapter"
        shares = share_tokens(order, starving, self._max_step_tokens)
        items, preempted = grant_blocks(order, shares, self._tables, self._tracked, ready)
        if not items:
            return None
        self._counters.preempted(len(preempted))
        for tracked in preempted:
            self._leave(tracked)
            self._kv_admission.add(tracked)
        for item in items:
            tracked = self._tracked[item.request_id]
            tracked.status = RequestStatus.RUNNING
            self._encoding.started(tracked, item.start)
            self.waits.waited(now - tracked.last_ran_s)
            if tracked.first_run_s is None:
                tracked.first_run_s = now
        return Batch(_mode_of(merged, items), merged, items, tuple(t.request_id for t in preempted))

    def _expire(self, now: float) -> None:
        if not self._bounds:
            return
        late: list[Tracked] = []
        while self._bounds:
            tracked = self._bounds[0][2]
            if self._find(tracked.request_id) is tracked:  # otherwise it ended, and its id may be reused
                if not tracked.expired(now):
                    break
                late.append(tracked)
            heapq.heappop(self._bounds)
        late.sort(key=lambda t: t.arrival_s)
        self._outputs += [self._end(tracked, "error", now, error=_deadline_missed(tracked, now)) for tracked in late]

    # -- record -------------------------------------------------------------------------------------------------------

    def record(self, batch: Batch, result: StepResult) -> tuple[RequestOutput, ...]:
        """Record a step's results; return new outputs, with a finished one for every request that ended."""
        now = self._clock()
        self._counters.step(batch, result)
        self.waits.stepped(result.step_s + result.switch_s)
        self._learn_costs(batch, result)
        outputs = self._record_images(batch, result, now) if batch.encode is not None else []
        for item in batch.items:
            tracked = self._tracked.get(item.request_id)
            if tracked is None:
                continue  # cancelled while the step ran
            self._counters.took_part(tracked, batch.mode)
            if item.request_id in result.errors:
                outputs.append(self._end(tracked, "error", now, error=result.errors[item.request_id]))
                continue
            for shares in self._shares:
                shares.serve(tracked, item.num_tokens)
            self._computed(tracked, item)
            tracked.last_ran_s = now
            if item.answers:
                outputs.append(self._answer(tracked, result, now))
        return tuple(outputs)

    def _record_images(self, batch: Batch, result: StepResult, now: float) -> list[RequestOutput]:
        assert batch.encode is not None
        if result.encoded is None:
            return []  # the step failed before encoding
        outputs: list[RequestOutput] = []
        for tracked in self._encoding.record(batch.encode, result.encoded):
            if tracked.first_run_s is None:
                tracked.first_run_s = now
            tracked.last_ran_s = now
            if tracked.request_id in result.errors:
                outputs.append(self._end(tracked, "error", now, error=result.errors[tracked.request_id]))
        return outputs

    def _computed(self, tracked: Tracked, item: BatchItem) -> None:
        """Record newly computed KV. Not called for failed items, so their blocks never become known."""
        stop = item.start + item.num_tokens
        self._counters.computed(tracked, item.start, stop)
        if tracked.chain is not None:
            self._tables.learn(item.request_id, tracked.chain, item.start, stop)
        tracked.place(stop)

    def _answer(self, tracked: Tracked, result: StepResult, now: float) -> RequestOutput:
        if tracked.first_answer_s is None:
            tracked.first_answer_s = now
            self._counters.answered(tracked)
            self._admission.observe(tracked, now - tracked.let_in_s)
        tracked.protected = False
        tracked.last_answer_s = now
        if tracked.is_head:
            return self._end(tracked, "head", now, head=result.heads[tracked.request_id])
        token = result.tokens[tracked.request_id]
        scores = (result.scores[tracked.request_id],) if tracked.request_id in result.scores else ()
        tracked.append(token)
        sampling = tracked.request.sampling
        stopped = token in self._eos_ids and not sampling.ignore_eos
        if stopped or tracked.num_sampled >= sampling.max_tokens:
            self._kv_admission.lengths.observe(tracked.num_sampled, sampling.max_tokens)
        if stopped:
            return self._end(tracked, "stop", now, tokens=(token,), scores=scores)
        if tracked.num_sampled >= sampling.max_tokens:
            return self._end(tracked, "length", now, tokens=(token,), scores=scores)
        return RequestOutput(request_id=tracked.request_id, token_ids=(token,), scores=scores)

    def _learn_costs(self, batch: Batch, result: StepResult) -> None:
        merged = self._merged_adapter = batch.merged_adapter
        if result.switched:
            if merged is None and result.in_place:
                self._cost.observe_back(result.switch_s)
            elif merged is not None and merged != self._shadow_adapter:
                self._cost.observe_switch(result.switch_s)
                self._shadow_adapter = None if result.in_place else merged
        encode_s = 0.0
        if result.encoded is not None:
            encode_s = result.encoded.seconds
            self._cost.observe_encoding(result.encoded.num_patches, encode_s)
        if batch.items and result.step_s > encode_s and not result.errors:
            # Measured separately, so that encoding time is never attributed to tokens.
            size = StepSize.of(batch)._replace(num_patches=0.0)
            self._cost.observe_step(size, result.step_s - encode_s)

    def _end(
        self,
        tracked: Tracked,
        reason: FinishReason,
        now: float,
        *,
        tokens: tuple[int, ...] = (),
        scores: tuple[TokenScore, ...] = (),
        head: HeadAnswer | None = None,
        error: ErrorValue | None = None,
    ) -> RequestOutput:
        if error is None and tracked.expired(now):  # max_latency_s limits the whole request: a late answer is an error
            reason, head, error = "error", None, _deadline_missed(tracked, now)
        self._forget(tracked)
        self._tables.free(tracked.request_id)
        tracked.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self._counters.ended(reason, failed=error is not None)
        return RequestOutput(
            request_id=tracked.request_id,
            token_ids=tokens,
            scores=scores,
            head=head,
            finish_reason=reason,
            error=error,
            timings=tracked.timings(now),
        )

    def _forget(self, tracked: Tracked) -> None:
        self._encoding.forget(tracked.request_id)
        for shares in self._shares:
            shares.ended(tracked)
        if self._tracked.pop(tracked.request_id, None) is None:
            self._admission.remove(tracked.request_id)
        else:
            self._kv_admission.remove(tracked)
            if tracked.entered:
                self._leave(tracked)
        if len(self._bounds) > 2 * (len(self._tracked) + len(self._admission)) + _FEW_ENDED:
            # A deadline may be hours away, and its entry keeps the request's images alive.
            self._bounds = [bound for bound in self._bounds if self._find(bound[2].request_id) is bound[2]]
            heapq.heapify(self._bounds)

    def _find(self, request_id: str) -> Tracked | None:
        return self._tracked.get(request_id) or self._admission.get(request_id)

    def _end_early(self, request_id: str, reason: FinishReason, error: ErrorValue) -> RequestOutput | None:
        tracked = self._find(request_id)
        return None if tracked is None else self._end(tracked, reason, self._clock(), error=error)


def _mode_of(merged: str | None, items: Sequence[BatchItem]) -> Mode:
    """The effective mode: merged if all requests use the weights in place (W0 for the base model)."""
    if all(item.adapter == merged for item in items):
        return Mode.MERGED
    return Mode.UNMERGED if merged is None else Mode.MIXED


def _deadline_missed(tracked: Tracked, now: float) -> ErrorValue:
    return ErrorValue.of(
        DeadlineMissed(
            f"request {tracked.request_id!r} exceeded its max_latency_s of {tracked.request.max_latency_s:g} s: "
            f"{tracked.num_sampled} tokens were generated in {now - tracked.arrival_s:.3f} s"
        )
    )


def _unreachable(tracked: Tracked, needed_s: float, now: float) -> ErrorValue:
    assert tracked.answer_by is not None
    left_s = max(0.0, tracked.answer_by - now)
    return ErrorValue.of(
        DeadlineUnreachable(
            f"the deadline cannot be met: the first answer of request {tracked.request_id!r} is predicted to take "
            f"{needed_s:.3f} s, and {left_s:.3f} s are left; retry later, or with a longer deadline"
        )
    )
