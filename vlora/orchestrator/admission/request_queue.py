"""All unfinished requests, by how far they have come: outside, admitted, or entered into the KV room."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from vlora.errors import PromptTooLong
from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.admission.early_abort import Admission
from vlora.orchestrator.admission.kv_admission import KvAdmission
from vlora.orchestrator.admission.load import AdapterCapacity, Load
from vlora.orchestrator.budgets import StepBudget
from vlora.orchestrator.cost_model import CostModel
from vlora.orchestrator.deadlines import Deadlines
from vlora.orchestrator.encoder_budget import EncodeQueue
from vlora.orchestrator.fairness import FairShares, adapter_of, scheduling_order, tenant_of
from vlora.orchestrator.request_state import TrackedRequest, update_prefix_hits
from vlora.types import Request, RequestStatus


class RequestQueue:
    """Admits requests, lets them enter the KV room, and removes them when they end.

    A request with a deadline on its first answer waits outside until `decide_admission` admits or refuses it; all
    others are admitted on arrival. With fair shares between tenants, all requests wait outside until there is room:
    starving requests come first among the admitted ones, so many requests of one tenant would starve together and
    dominate the batch. Resumed requests were admitted by another engine and are admitted on arrival.

    Attributes:
        admitted: admitted requests by id, in order of admission. Not to be changed by callers.
        adapter_starves: set by the scheduler: a request starves for an adapter that does not fit in memory.

    Args:
        max_request_blocks: KV blocks available to a single request, whatever adapters are resident.
        weights: fair shares between adapters; not applied if empty.
        tenant_weights: fair shares between tenants, which precede those between adapters; not applied if empty.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_request_blocks: int,
        budget: StepBudget,
        cost: CostModel,
        encoding: EncodeQueue,
        encode_share: float,
        weights: Mapping[str, float] | None,
        tenant_weights: Mapping[str, float] | None,
    ) -> None:
        self.admitted: dict[str, TrackedRequest] = {}
        self.adapter_starves = False
        self._block_manager = block_manager
        self._max_request_blocks = max_request_blocks
        self._budget = budget
        self._cost = cost
        self._encoding = encoding
        self._encode_share = encode_share
        self._shares = [
            FairShares(given, name_of)
            for given, name_of in ((weights, adapter_of), (tenant_weights, tenant_of))
            if given
        ]
        self._all_wait_outside = bool(tenant_weights)
        self._admission = Admission(self._shares)
        self._kv_admission = KvAdmission(block_manager, max_request_blocks, self._shares)
        self._adapter_capacity = AdapterCapacity()
        self._deadlines = Deadlines()
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self.admitted) + len(self._admission)

    def get(self, request_id: str) -> TrackedRequest | None:
        return self.admitted.get(request_id) or self._admission.get(request_id)

    def add(self, request: Request, now: float, *, held: bool, vision_key: str | None) -> None:
        """Add a request, see `Scheduler.add`."""
        assert self.get(request.request_id) is None
        tracked = TrackedRequest(request, now, self._block_manager.chain(request))
        tracked.held = held
        needed = self._block_manager.blocks_for(tracked.max_len)
        if needed > self._max_request_blocks:
            raise PromptTooLong(
                f"prompt and max_tokens require {tracked.max_len} tokens, or {needed} KV blocks of "
                f"{self._block_manager.block_size} tokens; {self._max_request_blocks} blocks are available to one "
                "request. Shorten the prompt, lower max_tokens, or start the engine with a larger arena_bytes"
            )
        self._encoding.add(tracked, vision_key)
        for shares in self._shares:
            shares.add(tracked)
        self._deadlines.add(tracked)
        if request.answered or (tracked.answer_by is None and not self._all_wait_outside):
            self._admit(tracked, now)
        else:
            self._admission.add(tracked)

    def remove(self, tracked: TrackedRequest) -> None:
        """Remove a request that has ended. The caller frees its blocks."""
        self._encoding.remove(tracked.request_id)
        for shares in self._shares:
            shares.remove(tracked)
        if self.admitted.pop(tracked.request_id, None) is None:
            self._admission.remove(tracked.request_id)
        else:
            self._kv_admission.remove(tracked)
        self._deadlines.discard_ended(num_unfinished=len(self))

    def pop_missed(self, now: float) -> list[TrackedRequest]:
        """The requests that have just missed their deadline, for the caller to end."""
        return self._deadlines.pop_missed(now)

    # -- admission ----------------------------------------------------------------------------------------------------

    def decide_admission(self, now: float, resident: Set[str]) -> Sequence[tuple[TrackedRequest, float]]:
        """Admit waiting requests; return those to refuse, each with the predicted seconds to its first answer.

        Args:
            now: seconds of the scheduler's clock.
        """
        if not self._admission:
            self._admission.end_idle_period()
            return ()
        update_prefix_hits(self._admission.waiting, self._block_manager)
        requests = self.admitted.values()
        # Requests without a deadline enter after those with one, so they do not delay the latter while waiting for KV
        # room.
        accepted = tuple(t for t in requests if t.entered or t.answer_by is not None)
        load = Load(
            accepted,
            self._cost.costs,
            max_batch_size=self._budget.max_batch_size,
            max_step_tokens=self._budget.max_step_tokens,
            block_size=self._block_manager.block_size,
            free_blocks=self._kv_admission.free_blocks(accepted),
            resident=resident,
            max_adapters=self._adapter_capacity.update((t for t in requests if t.entered), resident, now),
            all_wait_outside=self._all_wait_outside,
            patches_left=self._encoding.patches_left,
            encode_share=self._encode_share,
        )
        decision = self._admission.decide(now, load)
        for tracked in decision.admitted:
            self._admit(tracked, now)
        return decision.refused

    def enter(self, now: float) -> None:
        """Let admitted requests enter the KV room as far as there is room."""
        self._kv_admission.admit(now, self.admitted.values(), adapter_starves=self.adapter_starves)

    def requeue(self, preempted: Iterable[str]) -> None:
        """Let preempted requests wait for KV room again."""
        for request_id in preempted:
            self._kv_admission.add(self.admitted[request_id])

    def _admit(self, tracked: TrackedRequest, now: float) -> None:
        tracked.admit(next(self._arrivals), now)
        self.admitted[tracked.request_id] = tracked
        self._kv_admission.add(tracked)

    # -- order and measurements ---------------------------------------------------------------------------------------

    def in_order(self, requests: Sequence[TrackedRequest]) -> Sequence[TrackedRequest]:
        """The requests by priority, then fair shares, then their given order."""
        return scheduling_order(requests, self._shares)

    def count_service(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Count computed tokens towards the fair shares."""
        for shares in self._shares:
            shares.count_service(tracked, num_tokens)

    def observe_first_answer(self, tracked: TrackedRequest, now: float) -> None:
        """Learn how accurate the prediction of a first answer was."""
        self._admission.observe(tracked, now - tracked.admitted_s)

    def observe_answer_length(self, num_tokens: int, max_tokens: int) -> None:
        self._kv_admission.lengths.observe(num_tokens, max_tokens)

    # -- demand -------------------------------------------------------------------------------------------------------

    @property
    def entered_adapters(self) -> Set[str]:
        return self._kv_admission.entered_adapters

    @property
    def waiting_adapters(self) -> Set[str]:
        """Adapters of requests that wait for KV room, then for admission, each in order of arrival."""
        waiting = itertools.chain(self._kv_admission.waiting, self._admission.waiting)
        return dict.fromkeys(t.adapter for t in waiting if t.adapter is not None).keys()

    @property
    def blocks_short(self) -> int:
        """Additional free KV blocks that the next request needs to enter; 0 if none waits for room."""
        return self._kv_admission.blocks_short

    @property
    def outside(self) -> Collection[TrackedRequest]:
        return self._admission.waiting

    @property
    def num_waiting_for_kv(self) -> int:
        return len(self._kv_admission)

    def check_integrity(self) -> None:
        """Assert the invariants of the requests and their blocks.

        Lengths are in order, exactly the running requests hold blocks, each holds enough of them, and no request can
        write to a block that another may read.
        """
        blocks = self._block_manager
        for t in self.admitted.values():
            t.check_integrity()
            assert t.entered != (t.request_id in self._kv_admission), f"{t.request_id} is misplaced"
            held = len(blocks.table(t.request_id))
            running = t.status is RequestStatus.RUNNING
            assert bool(held) == running, f"{t.request_id} holds {held} blocks"
            assert not running or held >= blocks.blocks_for(t.cached_len), f"{t.request_id} lacks blocks"
            assert blocks.writable(t.request_id, t.cached_len), f"{t.request_id} would write to known blocks"
        assert blocks.holders <= self.admitted.keys(), "an ended request still holds blocks"
        self._encoding.check_integrity({*self.admitted, *(t.request_id for t in self._admission.waiting)})
