"""Early abort: requests with a bound on their first answer wait here until the next step has room for them, or until
it is certain enough that they cannot keep it (S-LoRA section 4.3 and appendix B). With fair shares between tenants the
others wait here, too, and are never refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from vlora.orchestrator.cost_model import Costs
from vlora.orchestrator.encoder_budget import ALONE_S, SHARE
from vlora.orchestrator.fairness import FairShares, in_turn
from vlora.orchestrator.request_state import Tracked

_SMOOTH = 0.1  # weight of the newest period in the moving averages of rates
# How a measured time scatters about the expected one, as TCP's retransmission timer has it (RFC 6298).
_MEAN, _DEVIATION, _DEVIATIONS = 1 / 8, 1 / 4, 2
_RELAX = 1 / 32  # how much of a pessimism that nothing can correct is dropped in a period


class Verdict(NamedTuple):
    """let_in: in the order in which they come in. refused: each with the seconds that its first answer was expected
    to take."""

    let_in: Sequence[Tracked]
    refused: Sequence[tuple[Tracked, float]]


class Load:
    """What is under way, as far as it delays the first answer of whoever is let in next, and what still has room.

    Requests without a bound are let in whatever there is, so they take no places here; nor do their prompts delay a
    request that is about to miss its bound, which starves, and starving requests come first.
    """

    def __init__(
        self,
        accepted: Sequence[Tracked],
        costs: Costs,
        *,
        max_batch_size: int,
        max_step_tokens: int,
        block_size: int,
        free_blocks: int,
        resident: Set[str],
        most_adapters: float,
        all_wait_outside: bool = False,
        patches_left: Callable[[Tracked], float] = lambda tracked: 0.0,
        encode_share: float = SHARE,
    ) -> None:
        """accepted: everybody who was let in and has not ended. resident: adapters in memory, which holds at most
        `most_adapters` as far as anybody knows. all_wait_outside: requests without a bound as well, so that they take
        places here like the others. patches_left: of a request's images, those still to encode."""
        self._costs = costs
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._block_size = block_size
        self._free_blocks = free_blocks
        self._num_accepted = len(accepted)
        bounded = accepted if all_wait_outside else [t for t in accepted if t.answer_by is not None]
        self._num_bounded = len(bounded)
        self._due = 0  # tokens until everybody with a bound has a first answer
        self._due_unseen = 0  # of these, tokens of requests with images to encode
        self._due_patches = 0.0
        self._patches_left = patches_left
        self._encode_share = encode_share
        for tracked in bounded:
            if tracked.first_answer_s is None:
                self._due += tracked.new_tokens
                patches = patches_left(tracked)
                self._due_patches += patches
                self._due_unseen += tracked.new_tokens if patches else 0
                if not tracked.entered:
                    self._free_blocks -= -(-tracked.new_tokens // block_size)
        new_tokens = [t.new_tokens for t in accepted]
        self._num_decoding = min(new_tokens.count(1), max_batch_size - 1)
        self._prompts = sum(new_tokens) - new_tokens.count(1)
        self._num_prompts = len(new_tokens) - new_tokens.count(1)
        self._context = sum(t.cached_len for t in accepted)
        self._tokens_a_step = max_step_tokens - self._num_decoding
        self._known: dict[int | tuple[int, float], float] = {}  # by tokens, and patches where there are images
        self._all_patches = sum([patches_left(t) for t in accepted if t.images])
        self._most_decoding = max([t.max_len - t.device_len for t in accepted if t.new_tokens == 1], default=0)
        self._resident = resident
        self._most_adapters = most_adapters
        self._needed = {t.adapter for t in accepted if t.adapter is not None}

    @property
    def will_tell(self) -> bool:
        """Whether somebody is under way whose first answer shows what predictions are worth."""
        return self._due > 0

    def has_room(self, tracked: Tracked) -> bool:
        """Whether the next step could begin with this one: a place in the batch, a token of the budget, KV blocks, time
        for its images."""
        if not self._num_bounded:
            return True  # one at a time always goes, whatever others hold
        blocks = -(-tracked.new_tokens // self._block_size)
        if tracked.images and self._due_patches * self._costs.patch_s >= ALONE_S and self._patches_left(tracked):
            return False
        return (
            self._num_bounded < self._max_batch_size
            and self._due - self._due_unseen < self._tokens_a_step
            and blocks <= self._free_blocks
        )

    def has_adapter(self, tracked: Tracked) -> bool:
        """Whether its adapter is in memory, or can be brought before the step: nobody else waits for one, and fewer are
        in use than memory holds.

        This is adapter clustering where it pays (S-LoRA section 4.2): with more adapters among those let in than
        memory holds, each step would bring adapters that the next one evicts.
        """
        return (
            tracked.adapter is None
            or tracked.adapter in self._resident
            or not self._num_bounded
            or (self._needed <= self._resident and len(self._needed) + 1 <= self._most_adapters)
        )

    def first_answer_s(self, tracked: Tracked) -> float:
        """Predicted seconds to the first answer of a request that is let in now."""
        # Each of a thousand waiting requests is looked at twice a step.
        new_tokens = tracked.device_len - tracked.cached_len
        key = (new_tokens, self._patches_left(tracked)) if tracked.images else new_tokens
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._predict_s(new_tokens, key[1] if isinstance(key, tuple) else 0.0)
        return seconds

    def prices_known(self, tracked: Tracked) -> bool:
        """Whether all that a prediction is made of has been measured."""
        return self._costs.patch_s > 0 or not (self._all_patches or self._patches_left(tracked))

    def take(self, tracked: Tracked) -> None:
        """Count one in that is let in."""
        self._num_accepted += 1
        self._num_bounded += 1
        self._due += tracked.new_tokens
        patches = self._patches_left(tracked)
        self._due_patches += patches
        self._all_patches += patches
        self._due_unseen += tracked.new_tokens if patches else 0
        self._prompts += tracked.new_tokens
        self._num_prompts += 1
        self._free_blocks -= -(-tracked.new_tokens // self._block_size)
        self._known.clear()
        if tracked.adapter is not None:
            self._needed.add(tracked.adapter)

    def _predict_s(self, new_tokens: int, patches: float) -> float:
        tokens_s, patch_s = self._tokens_s(new_tokens), self._costs.patch_s
        if not patches:
            return tokens_s + min(self._all_patches * patch_s, self._encode_share * tokens_s)
        # Images come before the prompt, in the order of their requests, and share the machine with those that decode.
        encode_s = (self._due_patches + patches) * patch_s
        decode_s = self._costs.merged_s(self._num_decoding, self._context)
        decode_s += self._costs.lanes_s(self._num_decoding, min(len(self._needed), self._num_decoding))
        beside_s = self._most_decoding * decode_s if self._num_decoding else 0.0
        return tokens_s + encode_s + min(encode_s / self._encode_share, beside_s)

    def _tokens_s(self, new_tokens: int) -> float:
        due = self._due + new_tokens
        num_steps = -(-due // self._tokens_a_step) + self._num_accepted // self._max_batch_size
        tokens = min(
            num_steps * self._max_step_tokens,
            num_steps * self._num_decoding + max(due, self._prompts + new_tokens),
        )
        decoding = num_steps * self._num_decoding
        # Who decodes shares a lane for each adapter; prompts have one each, or one a step where they are longer.
        decoding_lanes = num_steps * min(len(self._needed), self._num_decoding)
        prompt_lanes = min(max(num_steps, self._num_prompts + 1), num_steps * (len(self._needed) + 1))
        return (
            self._costs.merged_s(tokens, num_steps * self._context, num_steps)
            + self._costs.lanes_s(decoding, decoding_lanes)
            + self._costs.lanes_s(tokens - decoding, prompt_lanes)
        )


class Admission:
    """Holds requests until they are let in or, with a bound, refused, whichever comes first; both in a step's time.

    Every period (a step) ends with a verdict:

    1. Who could not answer in time even if it were let in now is refused.
    2. If more requests come in a period than can be let in, by moving averages, the newest are let in first, otherwise
       the oldest: under overload somebody must be refused, and who came last has most time left. Those without a bound
       keep their places. Priority and fair shares come before age.
    3. They are let in as long as the next step has room. Who needs an adapter that cannot be brought is passed over.
    4. Who is left, and so far behind that at the present rate it would be let in too late, is refused as well.

    S-LoRA's rule is 1 to 3 with the longest prefill seen as the expected time; here that is the cost model's
    prediction, times how much longer than predicted first answers took of late. While all are refused nothing is
    learned, so that one step that took far too long would close the door for good: then predictions are trusted a
    little less in each period, until somebody is let in and shows what they are worth.
    """

    def __init__(self, shares: Sequence[FairShares]) -> None:
        self._shares = shares
        self._waiting: dict[str, Tracked] = {}  # in order of arrival
        self._num_arrived = 0
        self._arrivals = _Average()  # a period
        self._entries = _Average()  # a period in which not all found room
        self._period_s = _Average()
        self._full_since: float | None = None
        self._trust = {False: _Trust(), True: _Trust()}  # in predictions for requests without and with images

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[Tracked]:
        """In order of arrival."""
        return self._waiting.values()

    def get(self, request_id: str) -> Tracked | None:
        return self._waiting.get(request_id)

    def add(self, tracked: Tracked) -> None:
        self._waiting[tracked.request_id] = tracked
        self._num_arrived += 1

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended."""
        del self._waiting[request_id]

    @property
    def overloaded(self) -> bool:
        """Whether more requests come than can be let in."""
        return self._entries.known and self._arrivals.value > self._entries.value

    def observe(self, tracked: Tracked, seconds: float) -> None:
        """Learn from a first answer how far predictions can be trusted."""
        if tracked.expected_s > 0:
            self._trust[bool(tracked.request.vision)].observe(seconds / tracked.expected_s)

    def rest(self) -> None:
        """End a period in which nobody waits."""
        self._arrivals.add(0)
        self._full_since = None

    def judge(self, now: float, load: Load) -> Verdict:
        """End a period: who is let in and does not wait here any more, and who is to be refused and removed."""
        self._arrivals.add(self._num_arrived)
        self._num_arrived = 0
        if self._full_since is not None:
            self._period_s.add(now - self._full_since)
        words_margin, picture_margin = (self._trust[shown].margin for shown in (False, True))
        refused: list[tuple[Tracked, float]] = []
        first_answer_s = load.first_answer_s

        def in_time(tracked: Tracked, wait_s: float = 0.0) -> bool:
            answer_by = tracked.answer_by
            if answer_by is None:
                return True
            margin = picture_margin if tracked.request.vision else words_margin
            needed_s = wait_s + margin * first_answer_s(tracked)
            if now + needed_s <= answer_by:
                return True
            refused.append((tracked, needed_s))
            return False

        queue = [tracked for tracked in self._waiting.values() if in_time(tracked)]
        if self.overloaded:
            newest = reversed([tracked for tracked in queue if tracked.answer_by is not None])
            queue = [tracked if tracked.answer_by is None else next(newest) for tracked in queue]
        queue = list(in_turn(queue, self._shares))
        let_in: list[Tracked] = []
        left: list[Tracked] = []
        for place, tracked in enumerate(queue):
            if not load.has_room(tracked):
                left += queue[place:]
                break
            if not load.has_adapter(tracked):
                left.append(tracked)
            elif in_time(tracked):  # those let in just now have made it longer
                # While the price of a patch is not known, a prediction says nothing about predictions.
                tracked.expected_s = load.first_answer_s(tracked) if load.prices_known(tracked) else 0.0
                load.take(tracked)
                let_in.append(tracked)
        if left:
            self._entries.add(len(let_in))
        self._full_since = now if left else None
        entry_s = self._period_s.value / self._entries.value if self._entries.value else 0.0
        if let_in or entry_s:  # else nothing has changed since the first look
            num_ahead = 0
            for tracked in left:
                num_ahead += in_time(tracked, num_ahead * entry_s)
        if refused and not let_in and not load.will_tell:
            for trust in self._trust.values():
                trust.relax()
        for tracked in let_in:
            del self._waiting[tracked.request_id]
        return Verdict(let_in, refused)


class _Trust:
    """How much longer than predicted first answers took of late, and how far that scatters."""

    def __init__(self) -> None:
        self._slowness = 1.0
        self._scatter = 0.0

    @property
    def margin(self) -> float:
        """What predictions are multiplied with."""
        return self._slowness + _DEVIATIONS * self._scatter

    def observe(self, ratio: float) -> None:
        """Learn from a first answer that took so many times what was predicted."""
        error = ratio - self._slowness
        self._scatter += _DEVIATION * (abs(error) - self._scatter)
        self._slowness += _MEAN * error

    def relax(self) -> None:
        """Trust predictions a little more, while nothing corrects them."""
        self._slowness *= 1 - _RELAX
        self._scatter *= 1 - _RELAX


class _Average:
    """An exponential moving average; the first value starts it."""

    def __init__(self) -> None:
        self.known = False
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value = (1 - _SMOOTH) * self.value + _SMOOTH * value if self.known else value
        self.known = True
