"""All unfinished requests, by how far they have come: outside, admitted, or entered into the KV room."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set

from vlora.errors import DeadlineMissed, DeadlineUnreachable, PromptTooLong
from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.admission.early_abort import AdapterCapacity, Admission, Load
from vlora.orchestrator.admission.kv_admission import KvAdmission
from vlora.orchestrator.budgets import StepBudget
from vlora.orchestrator.cost_model import CostModel
from vlora.orchestrator.encoder_budget import EncodeQueue
from vlora.orchestrator.fairness import FairShares, adapter_of, scheduling_order, tenant_of
from vlora.orchestrator.request_state import TrackedRequest, update_prefix_hits
from vlora.types import ErrorValue, Request, RequestStatus


@dataclasses.dataclass(eq=False)
class RequestQueue:
    """Admits requests, lets them enter the KV room, and removes them when they end.

    A request with a deadline on its first answer waits outside until `decide_admission` admits or refuses it; all
    others are admitted on arrival. With fair shares between tenants, all requests wait outside until there is room:
    starving requests come first among the admitted ones, so many requests of one tenant would starve together and
    dominate the batch. Resumed requests were admitted by another engine and are admitted on arrival.

    Attributes:
        admitted: admitted requests by id, in order of admission. Not to be changed by callers.
        adapter_starves: set by the scheduler: a request starves for an adapter that does not fit in memory.
        outside: requests that wait to be admitted.
        kv: admitted requests that wait for KV room.

    Args:
        max_request_blocks: KV blocks available to a single request, whatever adapters are resident.
        weights: fair shares between adapters; not applied if empty.
        tenant_weights: fair shares between tenants, which precede those between adapters; not applied if empty.
    """

    block_manager: BlockManager
    max_request_blocks: int
    budget: StepBudget
    cost: CostModel
    encoding: EncodeQueue
    encode_share: float
    weights: Mapping[str, float]
    tenant_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        self.admitted: dict[str, TrackedRequest] = {}
        self.adapter_starves = False
        named = (self.weights, adapter_of), (self.tenant_weights, tenant_of)
        self._shares = [FairShares(weights, name_of) for weights, name_of in named if weights]
        self.outside = Admission(self._shares)
        self.kv = KvAdmission(self.block_manager, self.max_request_blocks, self._shares)
        self._adapter_capacity = AdapterCapacity()
        self.deadlines = Deadlines()  # of all requests
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self.admitted) + len(self.outside)

    def get(self, request_id: str) -> TrackedRequest | None:
        return self.admitted.get(request_id) or self.outside.get(request_id)

    def add(self, request: Request, now: float, *, num_holds: int, vision_key: str | None) -> None:
        assert self.get(request.request_id) is None
        tracked = TrackedRequest(request, now, self.block_manager.chain(request))
        tracked.num_holds = num_holds
        needed = self.block_manager.blocks_for(tracked.max_len)
        if needed > self.max_request_blocks:
            raise PromptTooLong(
                f"prompt and max_tokens require {tracked.max_len} tokens, or {needed} KV blocks of "
                f"{self.block_manager.block_size} tokens; {self.max_request_blocks} blocks are available to one "
                "request. Shorten the prompt, lower max_tokens, or start the engine with a larger arena_bytes"
            )
        self.encoding.add(tracked, vision_key)
        for shares in self._shares:
            shares.add(tracked)
        self.deadlines.add(tracked)
        if request.answered or (tracked.answer_by is None and not self.tenant_weights):
            self._admit(tracked, now)
        else:
            self.outside.add(tracked)

    def remove(self, tracked: TrackedRequest) -> None:
        """Remove a request that has ended. The caller frees its blocks."""
        self.encoding.remove(tracked.request_id)
        for shares in self._shares:
            shares.remove(tracked)
        if self.admitted.pop(tracked.request_id, None) is None:
            self.outside.remove(tracked.request_id)
        else:
            self.kv.remove(tracked)
        self.deadlines.remove(tracked.request_id)

    # -- admission ----------------------------------------------------------------------------------------------------

    def decide_admission(self, now: float, resident: Set[str]) -> Sequence[tuple[TrackedRequest, float]]:
        """Admit waiting requests; return those to refuse, each with the predicted seconds to its first answer.

        Args:
            now: seconds of the scheduler's clock.
        """
        if not self.outside:
            self.outside.end_idle_period()
            return ()
        update_prefix_hits(self.outside.waiting, self.block_manager)
        requests = self.admitted.values()
        # Requests without a deadline enter after those with one, so they do not delay the latter while waiting for KV
        # room.
        accepted = tuple(t for t in requests if t.entered or t.answer_by is not None)
        load = Load(
            accepted,
            self.cost.costs,
            max_batch_size=self.budget.max_batch_size,
            max_step_tokens=self.budget.max_step_tokens,
            block_size=self.block_manager.block_size,
            free_blocks=self.kv.free_blocks(accepted),
            resident=resident,
            max_adapters=self._adapter_capacity.update((t for t in requests if t.entered), resident, now),
            all_wait_outside=bool(self.tenant_weights),
            patches_left=self.encoding.patches_left,
            encode_share=self.encode_share,
        )
        decision = self.outside.decide(now, load)
        for tracked in decision.admitted:
            self._admit(tracked, now)
        return decision.refused

    def enter(self, now: float) -> None:
        """Let admitted requests enter the KV room as far as there is room."""
        self.kv.admit(now, self.admitted.values(), adapter_starves=self.adapter_starves)

    def requeue(self, preempted: Iterable[str]) -> None:
        """Let preempted requests wait for KV room again."""
        for request_id in preempted:
            self.kv.add(self.admitted[request_id])

    def _admit(self, tracked: TrackedRequest, now: float) -> None:
        tracked.admit(next(self._arrivals), now)
        self.admitted[tracked.request_id] = tracked
        self.kv.add(tracked)

    # -- order and measurements ---------------------------------------------------------------------------------------

    def in_order(self, requests: Sequence[TrackedRequest]) -> Sequence[TrackedRequest]:
        """The requests by priority, then fair shares, then their given order."""
        return scheduling_order(requests, self._shares)

    def count_service(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Count computed tokens towards the fair shares."""
        for shares in self._shares:
            shares.count_service(tracked, num_tokens)

    # -- demand -------------------------------------------------------------------------------------------------------

    @property
    def waiting_adapters(self) -> Set[str]:
        """Adapters of requests that wait for KV room, then for admission, each in order of arrival."""
        waiting = itertools.chain(self.kv.waiting, self.outside.waiting)
        return dict.fromkeys(t.adapter for t in waiting if t.adapter is not None).keys()

    def check_integrity(self) -> None:
        """Assert the invariants of the requests and their blocks.

        Lengths are in order, exactly the running requests hold blocks, each holds enough of them, and no request can
        write to a block that another may read.
        """
        blocks = self.block_manager
        for t in self.admitted.values():
            t.check_integrity()
            assert t.entered != (t.request_id in self.kv), f"{t.request_id} is misplaced"
            held = len(blocks.table(t.request_id))
            running = t.status is RequestStatus.RUNNING
            assert bool(held) == running, f"{t.request_id} holds {held} blocks"
            assert not running or held >= blocks.blocks_for(t.cached_len), f"{t.request_id} lacks blocks"
            assert blocks.writable(t.request_id, t.cached_len), f"{t.request_id} would write to known blocks"
        assert blocks.holders <= self.admitted.keys(), "an ended request still holds blocks"
        self.encoding.check_integrity({*self.admitted, *(t.request_id for t in self.outside.waiting)})


class Deadlines:
    """The unfinished requests with a max_latency_s."""

    def __init__(self) -> None:
        self._bounded: dict[str, TrackedRequest] = {}  # in order of arrival
        self._next_s = math.inf  # no later than the first of their ends

    def add(self, tracked: TrackedRequest) -> None:
        """Add a request. One without a max_latency_s is ignored."""
        if tracked.end_by < math.inf:
            self._bounded[tracked.request_id] = tracked
            self._next_s = min(self._next_s, tracked.end_by)

    def remove(self, request_id: str) -> None:
        self._bounded.pop(request_id, None)

    def missed(self, now: float) -> list[TrackedRequest]:
        """The requests that have missed their deadline, in order of arrival. The caller ends them."""
        if now <= self._next_s:
            return []
        late = [t for t in self._bounded.values() if now > t.end_by]
        self._next_s = min((t.end_by for t in self._bounded.values() if now <= t.end_by), default=math.inf)
        return late


def deadline_missed(tracked: TrackedRequest, now: float) -> ErrorValue:
    """The error of a request that has exceeded its max_latency_s."""
    return ErrorValue.of(
        DeadlineMissed(
            f"request {tracked.request_id!r} exceeded its max_latency_s of {tracked.request.max_latency_s:g} s: "
            f"{tracked.num_sampled} tokens were generated in {now - tracked.arrival_s:.3f} s"
        )
    )


def deadline_unreachable(tracked: TrackedRequest, needed_s: float, now: float) -> ErrorValue:
    """The error of a request whose first answer is predicted to take `needed_s`, too long for its deadline."""
    assert tracked.answer_by is not None
    left_s = max(0.0, tracked.answer_by - now)
    return ErrorValue.of(
        DeadlineUnreachable(
            f"the deadline cannot be met: the first answer of request {tracked.request_id!r} is predicted to take "
            f"{needed_s:.3f} s, and {left_s:.3f} s are left; retry later, or with a longer deadline"
        )
    )
