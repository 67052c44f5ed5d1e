"""One request as the scheduler tracks it: counts and times, no tensors."""

from __future__ import annotations

from vlora.types import Mode, Request, RequestStatus, Timings


class Tracked:
    """Three lengths and their order: cached_len <= device_len <= max_len.

    cached_len: tokens whose KV is in place. device_len: tokens known (prompt and sampled). max_len: the ceiling.
    Times are in seconds of the scheduler's clock.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "arrival_s",
        "cached_len",
        "device_len",
        "first_answer_s",
        "first_run_s",
        "is_head",
        "last_ran_s",
        "max_len",
        "num_preemptions",
        "prompt_len",
        "protected",
        "request",
        "request_id",
        "status",
        "steps_by_mode",
    )

    def __init__(self, request: Request, arrival: int, now: float) -> None:
        self.request = request
        self.request_id = request.request_id
        self.adapter = request.adapter
        self.is_head = request.head is not None
        self.arrival = arrival  # counts up, so that no two requests arrive together
        self.arrival_s = now
        self.last_ran_s = now
        self.prompt_len = len(request.prompt_ids)
        self.max_len = self.prompt_len + (0 if self.is_head else request.sampling.max_tokens)
        self.cached_len = 0
        self.device_len = self.prompt_len
        self.status = RequestStatus.WAITING
        self.first_run_s: float | None = None
        self.first_answer_s: float | None = None
        self.num_preemptions = 0
        self.protected = False  # preempted, and has not yielded a token since
        self.steps_by_mode: dict[Mode, int] = {}

    @property
    def num_sampled(self) -> int:
        return self.device_len - self.prompt_len

    @property
    def new_tokens(self) -> int:
        """Tokens still to compute before the next answer."""
        return self.device_len - self.cached_len

    def expired(self, now: float) -> bool:
        """Whether the caller's latency bound has passed."""
        bound = self.request.max_latency_s
        return bound is not None and now - self.arrival_s > bound

    def preempt(self) -> None:
        """Back to waiting: the KV is gone, the sampled tokens stay."""
        self.cached_len = 0
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
            steps_by_mode={mode.value: count for mode, count in self.steps_by_mode.items()},
        )

    def check_integrity(self) -> None:
        """Prove the order of the three lengths, and that what is answered or preempted looks like it."""
        assert 0 <= self.cached_len <= self.device_len <= self.max_len, f"{self.request_id}: lengths out of order"
        assert self.new_tokens >= 1, f"{self.request_id} has nothing left to compute but was not ended"
        assert (self.status is RequestStatus.RUNNING) or self.cached_len == 0, f"{self.request_id} waits but holds KV"
