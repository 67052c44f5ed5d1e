"""The load on the machine as admission sees it: how long a first answer would take, and what room is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set

from vlora.orchestrator.cost_model import Costs
from vlora.orchestrator.encoder_budget import ALONE_S, SHARE
from vlora.orchestrator.request_state import TrackedRequest

_MORE_ADAPTERS = 1 / 256  # per decision: adapters differ in size, and some are unloaded


class Load:
    """The current load: how much it delays the first answer of the next admitted request, and the room left.

    Requests without a deadline are always admitted, so they take no places here. Their prompts do not delay a request
    that is about to miss its deadline either: it starves, and starving requests run first.
    """

    def __init__(
        self,
        accepted: Sequence[TrackedRequest],
        costs: Costs,
        *,
        max_batch_size: int,
        max_step_tokens: int,
        block_size: int,
        free_blocks: int,
        resident: Set[str],
        max_adapters: float,
        all_wait_outside: bool = False,
        patches_left: Callable[[TrackedRequest], float] = lambda tracked: 0.0,
        encode_share: float = SHARE,
    ) -> None:
        """Collect the load.

        Args:
            free_blocks: KV blocks that no entered request is expected to need.
            max_adapters: estimated number of adapters that memory holds.
            all_wait_outside: requests without a deadline wait for admission too, so they take places here.
            patches_left: image patches of a request that are still to be encoded.
        """
        self._costs = costs
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._block_size = block_size
        self._free_blocks = free_blocks
        self._num_accepted = len(accepted)
        bounded = accepted if all_wait_outside else [t for t in accepted if t.answer_by is not None]
        self._num_bounded = len(bounded)
        self.num_pending = 0  # requests whose first answer will show how accurate predictions are
        self._due = 0  # tokens until all requests with a deadline have a first answer
        self._due_unseen = 0  # of these, tokens of requests with images to encode
        self._due_patches = 0.0
        self._patches_left = patches_left
        self._encode_share = encode_share
        for tracked in bounded:
            if tracked.first_answer_s is None:
                self.num_pending += 1
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
        self._known: dict[int | tuple[int, float], float] = {}  # predictions by tokens, and patches if there are any
        self._all_patches = sum([patches_left(t) for t in accepted if t.images])
        self._most_decoding = max([t.max_len - t.device_len for t in accepted if t.new_tokens == 1], default=0)
        self._resident = resident
        self._most_adapters = max_adapters
        self._needed = {t.adapter for t in accepted if t.adapter is not None}

    def has_room(self, tracked: TrackedRequest) -> bool:
        """Whether the next step has a batch slot, budget tokens, KV blocks and encoding time for the request."""
        if not self._num_bounded:
            return True  # a single request is always admitted
        blocks = -(-tracked.new_tokens // self._block_size)
        if tracked.images and self._due_patches * self._costs.patch_s >= ALONE_S and self._patches_left(tracked):
            return False
        return (
            self._num_bounded < self._max_batch_size
            and self._due - self._due_unseen < self._tokens_a_step
            and blocks <= self._free_blocks
        )

    def has_adapter(self, tracked: TrackedRequest) -> bool:
        """Whether the adapter is resident or can be loaded before the step.

        It can be loaded if no other request waits for an adapter and fewer adapters are in use than memory holds. This
        limits adapter clustering to where it pays (S-LoRA section 4.2): if the admitted requests used more adapters
        than memory holds, each step would load adapters that the next one evicts.
        """
        return (
            tracked.adapter is None
            or tracked.adapter in self._resident
            or not self._num_bounded
            or (self._needed <= self._resident and len(self._needed) + 1 <= self._most_adapters)
        )

    def first_answer_s(self, tracked: TrackedRequest) -> float:
        """Predicted seconds to the first answer of a request that is admitted now."""
        # Called twice a step for each waiting request, of which there may be a thousand.
        new_tokens = tracked.device_len - tracked.cached_len
        key = (new_tokens, self._patches_left(tracked)) if tracked.images else new_tokens
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._predict_s(new_tokens, key[1] if isinstance(key, tuple) else 0.0)
        return seconds

    def costs_known(self, tracked: TrackedRequest) -> bool:
        """Whether all costs that the prediction uses have been measured."""
        return self._costs.patch_s > 0 or not (self._all_patches or self._patches_left(tracked))

    def add(self, tracked: TrackedRequest) -> None:
        self._num_accepted += 1
        self._num_bounded += 1
        self.num_pending += 1
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
        # Images are encoded before the prompt, in request order, concurrently with decoding requests.
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
        # Decoding requests share one lane per adapter. Each prompt has its own lane, or one per step if longer than a
        # step.
        decoding_lanes = num_steps * min(len(self._needed), self._num_decoding)
        prompt_lanes = min(max(num_steps, self._num_prompts + 1), num_steps * (len(self._needed) + 1))
        return (
            self._costs.merged_s(tokens, num_steps * self._context, num_steps)
            + self._costs.lanes_s(decoding, decoding_lanes)
            + self._costs.lanes_s(tokens - decoding, prompt_lanes)
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
