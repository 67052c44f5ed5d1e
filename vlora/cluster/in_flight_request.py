"""One request on its way across replicas: its attempts, the tokens so far, and the bounds and times that go on."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from vlora.errors import AdapterChanged, DeadlineMissed, DeadlineUnreachable, OverCapacity, VLoraError
from vlora.types import ErrorValue, Request, RequestOutput, Timings, seed_of


class InFlightRequest:
    """A request with what it has answered. Nothing else has to survive a replica.

    Each attempt has a request id of its own, so that outputs of earlier ones, and of other front ends, are recognized.

    Attributes:
        attempt_id: Of the current attempt; empty before the first one, and after the last one has failed.
        replica: Where the current attempt runs; None while the request waits.
        leaving: Whether it is moved, and its replica still has to return the last tokens.
        refusal: The error of a replica that could not take it.
        lacking: Replicas that have refused it, since they lack the content with which it began.
        num_moves, num_deaths: See Timings.
    """

    def __init__(self, request: Request, deliver: Callable[[RequestOutput], None], clock: Callable[[], float]) -> None:
        """Begin without an attempt."""
        self.request = request
        self.tokens: list[int] = []
        self.attempt_id = ""
        self.replica: str | None = None
        self.leaving = False
        self.cancelled = False
        self.refusal: ErrorValue | None = None
        self.lacking: set[str] = set()
        self.num_moves = 0
        self.num_deaths = 0
        self._deliver = deliver
        self._clock = clock
        self._attempt = 0
        self._sampling = msgspec.structs.replace(request.sampling, seed=seed_of(request.request_id, request.sampling))
        self._version: str | None = None
        self._stays = False
        self.began_s = self._waits_since_s = self._attempt_s = clock()
        self._first_s: float | None = None
        self._queue_s = 0.0
        self._num_preemptions = 0
        self._steps: Counter[str] = Counter()
        self._num_cached: int | None = None

    @property
    def version(self) -> str | None:
        """The content hash that its adapter must have; None while the answer may begin with any."""
        return self._version if self.tokens or self._stays else None

    def stay_with(self, version: str) -> None:
        """The answer, which has not begun as far as is known, has to begin with this content of its adapter."""
        if self._version is None:
            self._version, self._stays = version, True

    @property
    def answer_by(self) -> float | None:
        """When the first answer is due; None without a bound, and after the first attempt, since it was accepted."""
        bounds = [bound for bound in (self.request.max_ttft_s, self.request.max_latency_s) if bound is not None]
        return self.began_s + min(bounds) if bounds and not self._attempt else None

    def begin(self, replica: str, mark: str) -> Request | None:
        """Begin an attempt, which no other one has the mark of.

        Returns the request to send; None if its time has passed, and it has ended.
        """
        now = self._clock()
        self._queue_s += now - self._waits_since_s
        self._attempt += 1
        self.attempt_id = f"{self.request.request_id}#{mark}"
        self._attempt_s = now
        self.replica = replica
        used_s = now - self.began_s
        latency_s, ttft_s = self.request.max_latency_s, self.request.max_ttft_s
        if latency_s is not None:
            latency_s -= used_s
            if latency_s <= 0:
                self.fail(ErrorValue.of(self.deadline_missed()))
                return None
        if self._attempt > 1 or (ttft_s is not None and ttft_s <= used_s):
            ttft_s = math.inf  # it was accepted before, so it is not refused for its first token
        elif ttft_s is not None:
            ttft_s -= used_s
        return msgspec.structs.replace(
            self.request,
            request_id=self.attempt_id,
            sampling=self._sampling,
            max_latency_s=latency_s,
            max_ttft_s=ttft_s,
            answered=tuple(self.tokens),
            adapter_version=self.version,
        )

    def receive(self, output: RequestOutput) -> None:
        self._take(output)
        if output.finished:
            output = msgspec.structs.replace(
                output, timings=self._timings(output.timings), error=self._error(output.error)
            )
        self._deliver(msgspec.structs.replace(output, request_id=self.request.request_id, adapter_version=None))

    def leave(self, last: RequestOutput | None) -> None:
        """End the current attempt before the request's end. last: the attempt's last output, if it could be had."""
        self.replica = None
        self.leaving = False
        self._waits_since_s = self._clock()
        if last is None:
            return
        self._take(last)
        if last.token_ids:
            self._deliver(
                RequestOutput(request_id=self.request.request_id, token_ids=last.token_ids, scores=last.scores)
            )
        if last.timings is not None:
            self._add(last.timings)

    def fail(self, error: ErrorValue, reason: str = "error") -> None:
        assert reason in ("error", "cancelled")
        self.attempt_id = ""  # no outputs are expected any more
        self._attempt += 1
        timings = self._timings(None)
        self._deliver(
            RequestOutput(
                request_id=self.request.request_id,
                finish_reason="error" if reason == "error" else "cancelled",
                error=error,
                timings=timings,
            )
        )

    @property
    def waited_s(self) -> float:
        """For how long it has waited for a replica, if it is on none."""
        return self._clock() - self._waits_since_s

    @property
    def has_expired(self) -> bool:
        """Whether its `max_latency_s` has passed."""
        bound_s = self.request.max_latency_s
        return bound_s is not None and self._clock() - self.began_s > bound_s

    def deadline_missed(self) -> DeadlineMissed:
        return DeadlineMissed(
            f"request {self.request.request_id!r} exceeded its max_latency_s of {self.request.max_latency_s:g} s: "
            f"{len(self.tokens)} tokens were generated in {self._clock() - self.began_s:.3f} s"
        )

    def refused(self, reason: str) -> VLoraError:
        """The error of a request that the router refused. reason: "deadline", "room" or "content"."""
        name = repr(self.request.request_id)
        if reason == "content":
            return AdapterChanged(
                f"no replica has the content of adapter {self.request.adapter!r} with which the answer to request "
                f"{name} began any more, after {len(self.tokens)} tokens; send the request again"
            )
        if self.refusal is not None:
            return self.refusal.to_exception()
        if reason == "deadline":
            return DeadlineUnreachable(
                f"the deadline cannot be met: request {name} waited for a replica until its bound had passed; retry "
                "later, or with a longer deadline"
            )
        return OverCapacity(
            f"no replica has room for request {name} with {len(self.request.prompt_ids)} prompt tokens and adapter "
            f"{self.request.adapter!r}; start replicas with a larger arena_bytes"
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take(self, output: RequestOutput) -> None:
        self._version = output.adapter_version or self._version
        if output.token_ids and self._first_s is None:
            self._first_s = self._clock()
        self.tokens += output.token_ids

    def _add(self, timings: Timings) -> None:
        self._queue_s += timings.queue_s
        self._num_preemptions += timings.num_preemptions
        self._steps.update(timings.steps_by_mode)
        if self._num_cached is None and timings.ttft_s is not None:
            self._num_cached = timings.num_cached_tokens

    def _timings(self, last: Timings | None) -> Timings | None:
        """The times of all attempts; if a replica died, those of its attempt are known by this process's clock only.

        last: of the last attempt; None if it has none, then there are timings only if an attempt was begun.
        """
        if last is None:
            if self._attempt <= 1:
                return None
            last = Timings(
                queue_s=0.0,
                ttft_s=None,
                latency_s=self._clock() - self._attempt_s,
                num_prompt_tokens=len(self.request.prompt_ids),
                num_completion_tokens=len(self.tokens),
                num_preemptions=0,
                steps_by_mode={},
            )
        before_s = self._attempt_s - self.began_s
        ttft_s = None if last.ttft_s is None else before_s + last.ttft_s
        if self._first_s is not None and self._first_s < self._attempt_s:
            ttft_s = self._first_s - self.began_s
        self._add(last)
        return msgspec.structs.replace(
            last,
            queue_s=self._queue_s,
            ttft_s=ttft_s,
            latency_s=before_s + last.latency_s,
            num_completion_tokens=max(last.num_completion_tokens, len(self.tokens)),
            num_preemptions=self._num_preemptions,
            steps_by_mode=dict(self._steps),
            num_cached_tokens=last.num_cached_tokens if self._num_cached is None else self._num_cached,
            num_moves=self.num_moves,
            num_deaths=self.num_deaths,
        )

    def _error(self, error: ErrorValue | None) -> ErrorValue | None:
        if error is None:
            return None
        if error.code == DeadlineMissed.code and self.request.max_latency_s is not None and self._attempt > 1:
            return ErrorValue.of(self.deadline_missed())
        return self.own_error(error)

    def own_error(self, error: ErrorValue) -> ErrorValue:
        """An error of a replica, with the request's own id."""
        message = error.message.replace(repr(self.attempt_id), repr(self.request.request_id))
        return msgspec.structs.replace(error, message=message)


MAX_BLOCKS = 64
"""Later blocks rarely decide between replicas."""


def prefix_keys(request: Request, adapter: str, block_size: int) -> tuple[bytes, ...]:
    """The keys of the prompt's full blocks, at most `MAX_BLOCKS`. None for token ids that no engine accepts.

    Equal keys mean equal KV, like those of an engine's prefix cache. In contrast to these, a prompt with images shares
    no block with prompts that have other images, not even the text before them: a router knows no placeholder tokens.

    Args:
        adapter: Its adapter's name and content hash, or the name if the content is not known; empty for the base model.
    """
    images = [item.content_hash for item in request.vision]
    key = blake2b(repr((adapter, images)).encode(), digest_size=16).digest()
    keys = []
    for end in range(block_size, min(len(request.prompt_ids), MAX_BLOCKS * block_size) + 1, block_size):
        try:
            tokens = array("q", request.prompt_ids[end - block_size : end])
        except OverflowError:
            return ()  # an engine refuses the request with the reason
        key = blake2b(key + tokens.tobytes(), digest_size=16).digest()
        keys.append(key)
    return tuple(keys)
