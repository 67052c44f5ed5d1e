"""Early abort: admission control for requests with a deadline on their first answer.

Such a request waits here until the next step has room for it, or until it is sufficiently certain to miss its deadline
(S-LoRA section 4.3 and appendix B). With fair shares between tenants, requests without a deadline wait here too and are
never refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import NamedTuple

from vlora.orchestrator.cost_model import Costs, measured_s
from vlora.orchestrator.encoder_budget import ALONE_S, SHARE
from vlora.orchestrator.fairness import FairShares, scheduling_order
from vlora.orchestrator.request_state import TrackedRequest

_SMOOTH = 0.1  # weight of the newest period in the moving averages of rates
# Mean and deviation of measured over predicted times, as in TCP's retransmission timer (RFC 6298). It is a mean
# absolute deviation: 2.5 are two standard deviations of normal ratios, so 2 % of the admitted are late.
_MEAN, _DEVIATION, _DEVIATIONS = 1 / 8, 1 / 4, 2.5
_FAR = 8.0  # no measured ratio counts as more, and no prediction exceeds so many times the longest first answer
_RELAX = 1 / 32  # fraction of predictions dropped per period while no first answer can correct them
_LEAST_RATE = 1 / 64  # admissions per period: an average of many periods without any would fall towards 0
_MORE_ADAPTERS = 1 / 256  # per decision: adapters differ in size, and some are unloaded


class AdmissionDecision(NamedTuple):
    """Outcome of one admission period.

    Attributes:
        refused: refused requests, each with the predicted seconds to its first answer.
    """

    admitted: Sequence[TrackedRequest]
    refused: Sequence[tuple[TrackedRequest, float]]


class Admission:
    """Queues requests until they are admitted or, if they have a deadline, refused. Both are decided once per step.

    Every period (a step) ends with a decision:

    1. Requests that would miss their deadline even if admitted now are refused.
    2. If more requests arrive per period than can be admitted, by moving averages, the newest are admitted first,
       otherwise the oldest. Under overload some requests must be refused, and the newest have most time left. Requests
       without a deadline keep their positions. Priority and fair shares precede age.
    3. Requests are admitted while the next step has room. A request with an adapter that cannot be loaded is skipped.
    4. A remaining request is refused as well if, at the current rate, it would be admitted too late.

    S-LoRA's rule is 1 to 3, with the longest prefill seen as the expected time. Here the expected time is the cost
    model's prediction, multiplied by the recent ratio of measured to predicted first-answer times, and at most a
    multiple of the longest first answer so far, for the request and each one ahead of it. Nothing is measured while all
    requests are refused, so one exceptionally slow step could block admission permanently. Predictions then shrink a
    little in each period, until a request is admitted and its first answer gives a new measurement.
    """

    def __init__(self, shares: Sequence[FairShares]) -> None:
        self._shares = shares
        self._waiting: dict[str, TrackedRequest] = {}  # in order of arrival
        self._num_arrived = 0
        self._arrivals = _Average()  # per period
        self._entries = _Average()  # admitted per period, over periods that left some waiting
        self._period_s = _Average()
        self._full_since: float | None = None
        self._longest_s = 0.0  # first answer; 0 before any
        self._relaxed = {False: 1.0, True: 1.0}  # factor of each one's predictions while no answer can correct them
        self._trust = {False: _Trust(), True: _Trust()}  # for requests without (False) and with images (True)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[TrackedRequest]:
        """Waiting requests in order of arrival."""
        return self._waiting.values()

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._waiting.get(request_id)

    def add(self, tracked: TrackedRequest) -> None:
        self._waiting[tracked.request_id] = tracked
        self._num_arrived += 1

    def remove(self, request_id: str) -> None:
        del self._waiting[request_id]

    @property
    def overloaded(self) -> bool:
        """Whether more requests arrive than can be admitted."""
        return self._entries.known and self._arrivals.value > self._entries.value

    def observe(self, tracked: TrackedRequest, seconds: float) -> None:
        """Update the limit and the margin of predictions from a measured first answer."""
        self._longest_s = max(self._longest_s, measured_s(seconds))
        self._relaxed[bool(tracked.request.vision)] = 1.0
        if tracked.expected_s > 0:
            self._trust[bool(tracked.request.vision)].observe(measured_s(seconds) / tracked.expected_s)

    def end_idle_period(self) -> None:
        """End a period in which no request waits."""
        self._arrivals.add(0)
        self._full_since = None

    def decide(self, now: float, load: Load) -> AdmissionDecision:
        """End a period: decide which requests to admit and which to refuse. The caller removes the refused ones."""
        self._arrivals.add(self._num_arrived)
        self._num_arrived = 0
        if self._full_since is not None:
            self._period_s.add(now - self._full_since)
        text_margin, image_margin = (self._trust[shown].margin for shown in (False, True))
        refused: list[tuple[TrackedRequest, float]] = []
        first_answer_s, limit_s = load.first_answer_s, _FAR * (self._longest_s or math.inf)

        def in_time(tracked: TrackedRequest, wait_s: float = 0.0) -> bool:
            answer_by = tracked.answer_by
            if answer_by is None:
                return True
            margin = image_margin if tracked.request.vision else text_margin
            relaxed = self._relaxed[bool(tracked.request.vision)]
            needed_s = wait_s + relaxed * min(margin * first_answer_s(tracked), limit_s * (1 + load.num_pending))
            if now + needed_s <= answer_by:
                return True
            refused.append((tracked, needed_s))
            return False

        queue = [tracked for tracked in self._waiting.values() if in_time(tracked)]
        if self.overloaded:
            newest = reversed([tracked for tracked in queue if tracked.answer_by is not None])
            queue = [tracked if tracked.answer_by is None else next(newest) for tracked in queue]
        queue = list(scheduling_order(queue, self._shares))
        admitted: list[TrackedRequest] = []
        left: list[TrackedRequest] = []
        for place, tracked in enumerate(queue):
            if not load.has_room(tracked):
                left += queue[place:]
                break
            if not load.has_adapter(tracked):
                left.append(tracked)
            elif in_time(tracked):  # recently admitted requests have increased the prediction
                # Without a measured cost per patch, the ratio would not measure the quality of the predictions.
                tracked.expected_s = load.first_answer_s(tracked) if load.costs_known(tracked) else 0.0
                load.add(tracked)
                admitted.append(tracked)
        if left:
            self._entries.add(len(admitted))
        self._full_since = now if left else None
        entry_s = self._period_s.value / max(self._entries.value, _LEAST_RATE) if self._entries.value else 0.0
        if admitted or entry_s:  # otherwise nothing has changed since the first check
            num_ahead = 0
            for tracked in left:
                num_ahead += in_time(tracked, num_ahead * entry_s)
        if refused and not admitted and not load.num_pending:
            for shown in {bool(tracked.request.vision) for tracked, _ in refused}:
                self._relaxed[shown] *= 1 - _RELAX
        for tracked in admitted:
            del self._waiting[tracked.request_id]
        return AdmissionDecision(admitted, refused)


class _Trust:
    """Recent ratio of measured to predicted first-answer times, and its deviation."""

    def __init__(self) -> None:
        self._slowness = 1.0
        self._scatter = 0.0

    @property
    def margin(self) -> float:
        """Factor applied to predictions."""
        return self._slowness + _DEVIATIONS * self._scatter

    def observe(self, ratio: float) -> None:
        """Update from a first answer; `ratio` is measured over predicted time."""
        error = min(max(1 / _FAR, ratio), _FAR) - self._slowness
        self._scatter += _DEVIATION * (abs(error) - self._scatter)
        self._slowness += _MEAN * error


class _Average:
    """An exponential moving average, initialized with the first value."""

    def __init__(self) -> None:
        self.known = False
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value = (1 - _SMOOTH) * self.value + _SMOOTH * value if self.known else value
        self.known = True


@dataclasses.dataclass(eq=False)
class Load:
    """The current load: how much it delays the first answer of the next admitted request, and the room left.

    Requests without a deadline are always admitted, so they take no places here. Their prompts do not delay a request
    that is about to miss its deadline either: it starves, and starving requests run first.
    """

    accepted: dataclasses.InitVar[Sequence[TrackedRequest]]
    costs: Costs
    max_batch_size: int
    max_step_tokens: int
    block_size: int
    free_blocks: int
    resident: Set[str]
    max_adapters: float
    all_wait_outside: dataclasses.InitVar[bool] = False
    patches_left: Callable[[TrackedRequest], float] = lambda tracked: 0.0
    encode_share: float = SHARE

    def __post_init__(self, accepted: Sequence[TrackedRequest], all_wait_outside: bool) -> None:
        self._num_accepted = len(accepted)
        bounded = accepted if all_wait_outside else [t for t in accepted if t.answer_by is not None]
        self._num_bounded = len(bounded)
        self.num_pending = 0  # requests whose first answer will show how accurate predictions are
        self._due = 0  # tokens until all requests with a deadline have a first answer
        self._due_unseen = 0  # of these, tokens of requests with images to encode
        self._due_patches = 0.0
        for tracked in bounded:
            if tracked.first_answer_s is None:
                self._count_due(tracked)
                if not tracked.entered:
                    self.free_blocks -= -(-tracked.new_tokens // self.block_size)
        new_tokens = [t.new_tokens for t in accepted]
        self._num_decoding = min(new_tokens.count(1), self.max_batch_size - 1)
        self._prompts = sum(new_tokens) - new_tokens.count(1)
        self._num_prompts = len(new_tokens) - new_tokens.count(1)
        self._context = sum(t.cached_len for t in accepted)
        self._tokens_a_step = self.max_step_tokens - self._num_decoding
        self._known: dict[int | tuple[int, float], float] = {}  # predictions by tokens, and patches if there are any
        self._all_patches = sum([self.patches_left(t) for t in accepted if t.images])
        self._most_decoding = max([t.max_len - t.device_len for t in accepted if t.new_tokens == 1], default=0)
        self._needed = {t.adapter for t in accepted if t.adapter is not None}

    def has_room(self, tracked: TrackedRequest) -> bool:
        """Whether the next step has a batch slot, budget tokens, KV blocks and encoding time for the request."""
        if not self._num_bounded:
            return True  # a single request is always admitted
        blocks = -(-tracked.new_tokens // self.block_size)
        if tracked.images and self._due_patches * self.costs.patch_s >= ALONE_S and self.patches_left(tracked):
            return False
        return (
            self._num_bounded < self.max_batch_size
            and self._due - self._due_unseen < self._tokens_a_step
            and blocks <= self.free_blocks
        )

    def has_adapter(self, tracked: TrackedRequest) -> bool:
        """Whether the adapter is resident or can be loaded before the step.

        It can be loaded if no other request waits for an adapter and fewer adapters are in use than memory holds. This
        limits adapter clustering to where it pays (S-LoRA section 4.2): if the admitted requests used more adapters
        than memory holds, each step would load adapters that the next one evicts.
        """
        return (
            tracked.adapter is None
            or tracked.adapter in self.resident
            or not self._num_bounded
            or (self._needed <= self.resident and len(self._needed) + 1 <= self.max_adapters)
        )

    def first_answer_s(self, tracked: TrackedRequest) -> float:
        """Predicted seconds to the first answer of a request that is admitted now."""
        # Called twice a step for each waiting request, of which there may be a thousand.
        new_tokens = tracked.device_len - tracked.cached_len
        key = (new_tokens, self.patches_left(tracked)) if tracked.images else new_tokens
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._predict_s(new_tokens, key[1] if isinstance(key, tuple) else 0.0)
        return seconds

    def costs_known(self, tracked: TrackedRequest) -> bool:
        """Whether all costs that the prediction uses have been measured."""
        return self.costs.patch_s > 0 or not (self._all_patches or self.patches_left(tracked))

    def add(self, tracked: TrackedRequest) -> None:
        self._num_accepted += 1
        self._num_bounded += 1
        self._all_patches += self._count_due(tracked)
        self._prompts += tracked.new_tokens
        self._num_prompts += 1
        self.free_blocks -= -(-tracked.new_tokens // self.block_size)
        self._known.clear()
        if tracked.adapter is not None:
            self._needed.add(tracked.adapter)

    def _count_due(self, tracked: TrackedRequest) -> float:
        """Count a request without a first answer. Returns its patches that are still to be encoded."""
        patches = self.patches_left(tracked)
        self.num_pending += 1
        self._due += tracked.new_tokens
        self._due_patches += patches
        self._due_unseen += tracked.new_tokens if patches else 0
        return patches

    def _predict_s(self, new_tokens: int, patches: float) -> float:
        tokens_s, patch_s = self._tokens_s(new_tokens), self.costs.patch_s
        if not patches:
            return tokens_s + min(self._all_patches * patch_s, self.encode_share * tokens_s)
        # Images are encoded before the prompt, in request order, concurrently with decoding requests.
        encode_s = (self._due_patches + patches) * patch_s
        decode_s = self.costs.merged_s(self._num_decoding, self._context)
        decode_s += self.costs.lanes_s(self._num_decoding, min(len(self._needed), self._num_decoding))
        beside_s = self._most_decoding * decode_s if self._num_decoding else 0.0
        return tokens_s + encode_s + min(encode_s / self.encode_share, beside_s)

    def _tokens_s(self, new_tokens: int) -> float:
        due = self._due + new_tokens
        num_steps = -(-due // self._tokens_a_step) + self._num_accepted // self.max_batch_size
        tokens = min(
            num_steps * self.max_step_tokens,
            num_steps * self._num_decoding + max(due, self._prompts + new_tokens),
        )
        decoding = num_steps * self._num_decoding
        # Decoding requests share one lane per adapter. Each prompt has its own lane, or one per step if longer than a
        # step.
        decoding_lanes = num_steps * min(len(self._needed), self._num_decoding)
        prompt_lanes = min(max(num_steps, self._num_prompts + 1), num_steps * (len(self._needed) + 1))
        return (
            self.costs.merged_s(tokens, num_steps * self._context, num_steps)
            + self.costs.lanes_s(decoding, decoding_lanes)
            + self.costs.lanes_s(tokens - decoding, prompt_lanes)
        )


class AdapterCapacity:
    """Estimates how many adapters memory holds.

    The estimate is the number resident when an adapter last failed to load, growing slowly to retry with more. It is
    infinite while no load has failed.
    """

    def __init__(self) -> None:
        self._estimate = math.inf
        self._decided_s = -math.inf

    def update(self, entered: Iterable[TrackedRequest], resident: Set[str], now: float) -> float:
        """The estimate at an admission decision.

        Args:
            entered: requests that may run. One that was admitted at an earlier decision and still has no adapter in
                memory shows that loading it has failed.
            now: seconds of the scheduler's clock.
        """
        needed = (t for t in entered if t.adapter)
        if any(t.adapter not in resident and t.admitted_s <= self._decided_s for t in needed):
            self._estimate = len(resident)
        else:
            self._estimate = max(self._estimate + _MORE_ADAPTERS, len(resident))
        self._decided_s = now
        return self._estimate
