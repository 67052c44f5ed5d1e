"""The state of one request in the scheduler: counts and times, no tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from vlora.memory.block_manager import BlockManager
from vlora.memory.prefix_cache import Key, TokenChain
from vlora.types import Mode, Request, RequestStatus, Timings

MAX_LOOKUPS = 128  # per step: many requests with one image must not delay a decision


class Image(NamedTuple):
    """An image or video of a request without embeddings in the runner yet.

    Attributes:
        place: index in `Request.vision`.
        key: its content hash, and the key of the adapter that applies vision-side deltas to it.
        last: prompt index of its last placeholder token.
    """

    place: int
    key: tuple[str, str | None]
    num_patches: float
    num_tokens: int
    last: int


@dataclasses.dataclass(eq=False, slots=True)
class TrackedRequest:
    """State of a request, with three lengths: cached_len <= device_len <= max_len.

    Times are in seconds of the scheduler's clock.

    Attributes:
        cached_len: tokens with KV in place; for a waiting request, the prefix-cache hit.
        active: the adapter of its next token. None before `Request.adapter_from`, and for requests of the base model.
        needed: the adapter that its next step reads: the active one, or that of a head over tokens before it is active.
        device_len: tokens (prompt and sampled); the last one may still be in flight.
        max_len: upper limit of device_len.
        chain: the keys of its blocks; None without a prefix cache.
        last_key: key of the last block in place; None if there is none.
        next_key: key of the next block that may be found in the prefix cache; None if there is none.
        arrival: counts up as requests are admitted, which is their arrival for policies. Requests without a deadline
            are admitted at once.
        last_ran_s: end of its last step; before the first one, the time of its admission or entry.
        answer_by: latest time for the first answer; None without a deadline, and for a resumed request.
        end_by: latest time of its end; infinite without a max_latency_s.
        expected_s: predicted time from admission to the first answer.
        num_holds: must not run while above 0: its grammar is not compiled yet, or its last token is being computed.
        entered: admitted to the KV room (`KvAdmission`): policies may select it, and its waiting time counts.
        last_answer_s: time of its last token, or of entry.
        computed_len: the maximum of cached_len so far.
        images: images without embeddings in the runner.
    """

    request: Request
    now: dataclasses.InitVar[float]
    chain: TokenChain | None
    request_id: str = dataclasses.field(init=False)
    adapter: str | None = dataclasses.field(init=False)
    tenant: str | None = dataclasses.field(init=False)
    priority: int = dataclasses.field(init=False)
    is_head: bool = dataclasses.field(init=False)
    active: str | None = dataclasses.field(init=False)
    needed: str | None = dataclasses.field(init=False)
    prompt_len: int = dataclasses.field(init=False)
    cached_len: int = dataclasses.field(init=False)
    device_len: int = dataclasses.field(init=False)
    max_len: int = dataclasses.field(init=False)
    computed_len: int = 0
    last_key: Key | None = None
    next_key: Key | None = None
    arrival: int = -1
    arrival_s: float = dataclasses.field(init=False)
    admitted_s: float = dataclasses.field(init=False)
    last_ran_s: float = dataclasses.field(init=False)
    last_answer_s: float = dataclasses.field(init=False)
    answer_by: float | None = dataclasses.field(init=False)
    end_by: float = dataclasses.field(init=False)
    first_run_s: float | None = None
    first_answer_s: float | None = None
    expected_s: float = 0.0
    status: RequestStatus = RequestStatus.WAITING
    num_holds: int = 0
    entered: bool = False
    protected: bool = False  # preempted, and no token sampled since
    images: list[Image] = dataclasses.field(default_factory=list)
    num_sampled: int = dataclasses.field(init=False)
    num_computed: int = 0  # prompt tokens computed, recomputation included
    num_reused: int = 0  # prompt tokens reused, known with the first answer
    num_preemptions: int = dataclasses.field(init=False)
    steps_by_mode: dict[Mode, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self, now: float) -> None:
        request = self.request
        self.request_id, self.adapter, self.tenant = request.request_id, request.adapter, request.tenant
        self.priority, self.is_head = request.priority, request.in_one_pass
        self.arrival_s = self.admitted_s = self.last_ran_s = self.last_answer_s = now
        bounds = [bound for bound in (request.max_ttft_s, request.max_latency_s) if bound is not None]
        self.answer_by = now + min(bounds) if bounds and not request.answered else None
        self.end_by = math.inf if request.max_latency_s is None else now + request.max_latency_s
        self.prompt_len = len(request.prompt_ids)
        self.max_len = self.prompt_len + (0 if self.is_head else request.sampling.max_tokens)
        self.num_sampled = len(request.answered)
        self.device_len = self.prompt_len + self.num_sampled
        self.num_preemptions = int(bool(request.answered))  # a resumed request enters as a preempted one
        self.set_cached_len(0)

    def set_cached_len(self, cached_len: int) -> None:
        """Set the number of tokens with KV in place."""
        self.cached_len = cached_len
        self.active = self.adapter if cached_len >= self.request.adapter_from else None
        self.needed = self.active if self.request.read_from is None else self.adapter
        if self.chain is None:
            return
        full = cached_len // self.chain.block_size
        self.last_key = self.chain.key(full - 1) if full else None
        self.next_key = self.chain.key(full) if self.chain.may_find(full, self.device_len) else None

    def append(self, token: int) -> None:
        """Append a sampled token, which device_len includes."""
        self.num_sampled += 1
        if self.chain is not None:
            self.chain.append(token)

    def keys(self, start: int, stop: int) -> list[Key]:
        """Keys of the blocks that become full by computing tokens [start, stop)."""
        if self.chain is None:
            return []
        return [self.chain.key(at) for at in range(start // self.chain.block_size, stop // self.chain.block_size)]

    @property
    def new_tokens(self) -> int:
        return self.device_len - self.cached_len

    @property
    def step_tokens(self) -> int:
        """Tokens that one step may compute: those before the next answer for which the same adapter is active."""
        start = self.request.adapter_from
        return (self.device_len if self.cached_len >= start else start) - self.cached_len

    def admit(self, arrival: int, now: float) -> None:
        """Admit the request: policies may select it once it has entered the KV room."""
        self.arrival = arrival
        self.admitted_s = self.last_ran_s = now

    def enter(self, now: float) -> None:
        self.entered = True
        self.last_ran_s = self.last_answer_s = now

    @property
    def has_ended(self) -> bool:
        return self.status in (RequestStatus.FINISHED, RequestStatus.FAILED)

    def preempt(self) -> None:
        """Return to waiting: the blocks are freed, the sampled tokens are kept."""
        self.set_cached_len(0)
        self.status = RequestStatus.WAITING
        self.num_preemptions += 1
        self.protected = True

    def timings(self, now: float) -> Timings:
        return Timings(
            queue_s=(now if self.first_run_s is None else self.first_run_s) - self.arrival_s,
            ttft_s=None if self.first_answer_s is None else self.first_answer_s - self.arrival_s,
            latency_s=now - self.arrival_s,
            num_prompt_tokens=self.prompt_len,
            num_completion_tokens=self.num_sampled,
            num_preemptions=self.num_preemptions - bool(self.request.answered),
            num_cached_tokens=self.num_reused,
            num_adapter_tokens=0 if self.adapter is None else self.prompt_len - self.request.adapter_from,
            steps_by_mode={mode.value: count for mode, count in self.steps_by_mode.items()},
        )

    def check_integrity(self) -> None:
        """Assert the order of the three lengths, and that a waiting request holds no KV."""
        assert 0 <= self.cached_len <= self.device_len <= self.max_len, f"{self.request_id}: lengths out of order"
        assert self.new_tokens >= 1, f"{self.request_id} has nothing left to compute but was not ended"
        assert self.chain is not None or self.status is RequestStatus.RUNNING or self.cached_len == 0, (
            f"{self.request_id} waits but holds KV"
        )


def update_prefix_hits(requests: Iterable[TrackedRequest], block_manager: BlockManager) -> None:
    """Advance every request to its prefix-cache hit, so that policies and budgets see the tokens left to compute.

    A running request takes over blocks that others have computed. For a waiting request the hit is a forecast: it holds
    no blocks, and looks them up again when it starts. A request without changes costs two key lookups.

    Args:
        requests: in order of arrival; the number of lookups is limited, and older requests take precedence.
    """
    if not block_manager.reuses:
        return
    known = block_manager.known
    left = MAX_LOOKUPS
    for tracked in requests:
        if tracked.next_key in known and tracked.request_id not in block_manager.written:
            assert tracked.chain is not None
            if tracked.status is RequestStatus.RUNNING:
                tracked.set_cached_len(
                    block_manager.reuse(tracked.request_id, tracked.chain, tracked.cached_len, tracked.device_len)
                )
                continue
            while left and tracked.next_key in known:
                tracked.set_cached_len(tracked.cached_len + tracked.chain.block_size)
                left -= 1
        elif tracked.status is RequestStatus.WAITING:
            while tracked.last_key is not None and tracked.last_key not in known:
                assert tracked.chain is not None
                tracked.set_cached_len(tracked.cached_len - tracked.chain.block_size)
