"""One request as the scheduler tracks it: counts and times, no tensors."""

from __future__ import annotations

from typing import NamedTuple

from vlora.memory.prefix_cache import Key, TokenChain
from vlora.types import Mode, Request, RequestStatus, Timings


class Image(NamedTuple):
    """An image or video of a request whose embeddings the runner does not hold yet.

    place: in `Request.vision`. key: its content hash, and the key of the adapter whose vision-side deltas apply.
    last: place in the prompt of its last placeholder token.
    """

    place: int
    key: tuple[str, str | None]
    num_patches: float
    num_tokens: int
    last: int


class Tracked:
    """Three lengths and their order: cached_len <= device_len <= max_len.

    cached_len: tokens whose KV is in place; of a request that waits, what the prefix cache has of it. device_len:
    tokens known (prompt and sampled). max_len: the ceiling. Times are in seconds of the scheduler's clock.

    chain: the keys of its blocks, None without a prefix cache. last_key, next_key: of the last block in place, and of
    the one that it would be worth finding; None where there is none.

    arrival counts up as requests are let in, which is when they arrive for policies: whoever came without a bound is
    let in at once. last_ran_s starts then, too. answer_by: until when the first answer must have come, if there is a
    bound. expected_s: how long that was expected to take from being let in on. held: not to run before its grammar is
    compiled. entered: admitted to the KV room (`KvAdmission`), so policies may choose it; from then on its waiting
    time counts. last_answer_s: of its last token, or when it entered. computed_len: the most tokens whose KV was in
    place at any time. images: those whose embeddings the runner does not hold for it yet.
    """

    __slots__ = (
        "adapter",
        "answer_by",
        "arrival",
        "arrival_s",
        "cached_len",
        "chain",
        "computed_len",
        "device_len",
        "entered",
        "expected_s",
        "first_answer_s",
        "first_run_s",
        "held",
        "images",
        "is_head",
        "last_answer_s",
        "last_key",
        "last_ran_s",
        "let_in_s",
        "max_len",
        "next_key",
        "num_computed",
        "num_preemptions",
        "num_reused",
        "priority",
        "prompt_len",
        "protected",
        "request",
        "request_id",
        "status",
        "steps_by_mode",
        "tenant",
    )

    def __init__(self, request: Request, now: float, chain: TokenChain | None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.adapter = request.adapter
        self.is_head = request.head is not None
        self.held = False
        self.images: list[Image] = []
        self.priority = request.priority
        self.tenant = request.tenant
        self.entered = False
        self.computed_len = 0
        self.arrival = -1
        self.arrival_s = now
        self.let_in_s = now
        self.last_ran_s = now
        self.last_answer_s = now
        bounds = [bound for bound in (request.max_ttft_s, request.max_latency_s) if bound is not None]
        self.answer_by = now + min(bounds) if bounds else None
        self.expected_s = 0.0
        self.prompt_len = len(request.prompt_ids)
        self.max_len = self.prompt_len + (0 if self.is_head else request.sampling.max_tokens)
        self.device_len = self.prompt_len
        self.chain = chain
        self.last_key: Key | None = None
        self.next_key: Key | None = None
        self.place(0)
        self.num_computed = 0  # tokens of the prompt, again after a preemption included
        self.num_reused = 0  # tokens of the prompt, known with the first answer
        self.status = RequestStatus.WAITING
        self.first_run_s: float | None = None
        self.first_answer_s: float | None = None
        self.num_preemptions = 0
        self.protected = False  # preempted, and has not yielded a token since
        self.steps_by_mode: dict[Mode, int] = {}

    def place(self, cached_len: int) -> None:
        """Say how many tokens' KV is in place."""
        self.cached_len = cached_len
        if self.chain is None:
            return
        full = cached_len // self.chain.block_size
        self.last_key = self.chain.key(full - 1) if full else None
        self.next_key = self.chain.key(full) if self.chain.may_find(full, self.device_len) else None

    def append(self, token: int) -> None:
        """One more token was sampled."""
        self.device_len += 1
        if self.chain is not None:
            self.chain.append(token)

    def keys(self, start: int, stop: int) -> list[Key]:
        """Keys of the blocks that computing tokens [start, stop) fills."""
        if self.chain is None:
            return []
        return [self.chain.key(at) for at in range(start // self.chain.block_size, stop // self.chain.block_size)]

    @property
    def num_sampled(self) -> int:
        return self.device_len - self.prompt_len

    @property
    def new_tokens(self) -> int:
        """Tokens still to compute before the next answer."""
        return self.device_len - self.cached_len

    def let_in(self, arrival: int, now: float) -> None:
        """From now on it is one of those that policies choose from."""
        self.arrival = arrival
        self.let_in_s = self.last_ran_s = now

    def enter(self, now: float) -> None:
        """There is KV room for it."""
        self.entered = True
        self.last_ran_s = self.last_answer_s = now

    def expired(self, now: float) -> bool:
        """Whether the caller's latency bound has passed."""
        bound = self.request.max_latency_s
        return bound is not None and now - self.arrival_s > bound

    def preempt(self) -> None:
        """Back to waiting: the blocks are gone, the sampled tokens stay."""
        self.place(0)
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
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_reused,
            steps_by_mode={mode.value: count for mode, count in self.steps_by_mode.items()},
        )

    def check_integrity(self) -> None:
        """Prove the order of the three lengths, and that what is answered or preempted looks like it."""
        assert 0 <= self.cached_len <= self.device_len <= self.max_len, f"{self.request_id}: lengths out of order"
        assert self.new_tokens >= 1, f"{self.request_id} has nothing left to compute but was not ended"
        assert self.chain is not None or self.status is RequestStatus.RUNNING or self.cached_len == 0, (
            f"{self.request_id} waits but holds KV"
        )
