"""A machine model that checks each batch: KV context in place, images encoded, mode correct, answers due.

It tracks the content of every KV slot, so it detects a context that is not where the scheduler expects it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.orchestrator.sample_requests import IMAGE_TOKEN, sampled_token
from vlora.orchestrator.cost_model import Costs
from vlora.simulator.machine import Clock, Machine
from vlora.types import (
    Batch,
    BatchItem,
    Encode,
    Encoded,
    ErrorValue,
    HeadAnswer,
    Mode,
    Request,
    StepResult,
    VisionInput,
)

_PIECE = 4  # patches are encoded in multiples of this number
_INVALID = "invalid"  # content of a slot after a failed step
_ANSWER = HeadAnswer(task="binary", label="yes", confidence=1.0, label_id=1, scores=(0.0, 1.0), labels=("no", "yes"))


class CheckedMachine(Machine):
    """Runs batches of requests made by `make_request` and asserts that each step could be computed.

    Attributes:
        cached: contents of images whose embeddings are cached. The first `num_cached` images of each call are.
        broken: contents of images that cannot be encoded.
        held: requests' images (id, index) with embeddings.
        num_encoded: how often each content was encoded.
    """

    def __init__(
        self, clock: Clock, costs: Costs, block_size: int, failing: Mapping[str, int], *, sharing: bool
    ) -> None:
        """`failing`: by request id, the number of its step that fails. `sharing`: whether blocks may be shared."""
        super().__init__(clock, costs)
        self.requests: dict[str, Request] = {}
        self.num_cached = 1
        self.cached: set[str] = set()
        self.broken: set[str] = set()
        self.held: set[tuple[str, int]] = set()
        self.num_encoded: Counter[str] = Counter()
        self._block_size = block_size
        self._steps_until_failure = dict(failing)
        self._sharing = sharing
        self._num_sampled: dict[str, int] = {}
        self._contents: dict[str, _Content] = {}
        self._slots: dict[tuple[int, int], object] = {}
        self._encode_calls: dict[int, tuple[tuple[tuple[str, int], ...], float]] = {}  # items and patches left

    def add(self, request: Request) -> None:
        """Add a request."""
        self.requests[request.request_id] = request
        self._num_sampled[request.request_id] = len(request.answered)
        self._contents[request.request_id] = _Content(request, None if self._sharing else request.request_id)

    def run(self, batch: Batch) -> StepResult:
        """Check a batch, run it and advance the clock."""
        assert batch.items or batch.encode
        _check_mode(batch)
        return super().run(batch)

    def move_block(self, block: int, target: int) -> None:
        """Move the content of a KV block."""
        for offset in range(self._block_size):
            self._slots[target, offset] = self._slots.pop((block, offset), None)

    def _compute(self, item: BatchItem, result: StepResult) -> None:
        """Check an item, write its KV and answer it, or fail its request if that is due."""
        request_id = item.request_id
        request = self.requests[request_id]
        known = len(request.prompt_ids) + self._num_sampled[request_id]
        stop = item.start + item.num_tokens
        begun = item.start >= request.adapter_from
        assert item.adapter == (request.adapter if begun else None) and (begun or stop <= request.adapter_from)
        assert item.num_tokens >= 1 and stop <= known and item.answers == (stop == known)
        self._check_images(item)
        content = self._contents[request_id]
        for index in range(item.start):
            assert self._slots[self._slot(item.block_table, index)] == content.at(index), "KV content is lost"
        for index in range(item.start, stop):
            self._slots[self._slot(item.block_table, index)] = content.at(index)
        self._steps_until_failure[request_id] = self._steps_until_failure.get(request_id, 0) - 1
        if self._steps_until_failure[request_id] == 0:
            for index in range(item.start, stop):
                self._slots[self._slot(item.block_table, index)] = _INVALID  # no request may read it
            result.errors[request_id] = ErrorValue("bad_image", "this one fails alone")
        elif item.answers and request.head is not None:
            result.heads[request_id] = _ANSWER
        elif item.answers:
            result.tokens[request_id] = sampled_token(request_id, self._num_sampled[request_id])
            self._num_sampled[request_id] += 1
            content.append(result.tokens[request_id])

    def _check_images(self, item: BatchItem) -> None:
        """Assert that embeddings of every image with computed tokens are held; cached ones are held from now on."""
        request = self.requests[item.request_id]
        image_of = [place for place, image in enumerate(request.vision) for _ in range(image.num_tokens)]
        placeholders = [index for index, token in enumerate(request.prompt_ids) if token == IMAGE_TOKEN]
        for index, place in zip(placeholders, image_of, strict=True):
            if index >= item.start:
                if request.vision[place].content_hash in self.cached:
                    self.held.add((request.request_id, place))
                assert (request.request_id, place) in self.held, f"image {place} of {request.request_id} is not encoded"

    def _encode(self, encode: Encode, errors: dict[str, ErrorValue]) -> Encoded:
        """Encode a call's share in pieces of `_PIECE` patches. The items of a call never change."""
        contents = dict.fromkeys(self._image(*item).content_hash for item in encode.items)
        if encode.number not in self._encode_calls:
            assert not self._encode_calls or encode.number > max(self._encode_calls), "calls are sequential"
            patches = {self._image(*item).content_hash: self._image(*item).num_patches for item in encode.items}
            total = sum(number for content, number in patches.items() if content not in self.cached)
            self._encode_calls[encode.number] = encode.items, float(total)
        items, left = self._encode_calls[encode.number]
        assert items == encode.items
        num_patches = min(left, max(1, math.ceil(encode.budget / _PIECE)) * _PIECE)
        done = num_patches == left
        self._encode_calls[encode.number] = items, left - num_patches
        seconds = self.costs.patch_s * num_patches
        if done and contents.keys() & self.broken:
            requests = {request_id for request_id, _ in items}
            if len(requests) == 1:
                errors[requests.pop()] = ErrorValue("bad_image", "it cannot be encoded")
            return Encoded(num_patches=num_patches, seconds=seconds, failed=True)
        if done:
            self.held.update(items)
            self.cached.update(list(contents)[: self.num_cached])
            self.num_encoded.update(contents.keys())
        return Encoded(num_patches=num_patches, seconds=seconds, done=done)

    def _image(self, request_id: str, place: int) -> VisionInput:
        return self.requests[request_id].vision[place]

    def _slot(self, table: Sequence[int], index: int) -> tuple[int, int]:
        return table[index // self._block_size], index % self._block_size


class _Content:
    """The inputs of the KV of each token: all tokens up to it, the images they show, and where the adapter began.

    `owner`: its id where blocks must not be shared.
    """

    def __init__(self, request: Request, owner: str | None) -> None:
        self._hashes: list[object] = [owner]
        self._adapter, self._adapter_from = request.adapter, request.adapter_from
        shown = [(image.content_hash, index) for image in request.vision for index in range(image.num_tokens)]
        for token in request.prompt_ids:
            self.append(token, shown.pop(0) if token == IMAGE_TOKEN else None)

    def append(self, token: int, shown: object = None) -> None:
        begun = self._adapter if len(self._hashes) > self._adapter_from else None
        self._hashes.append(hash((self._hashes[-1], begun, token, shown)))

    def at(self, index: int) -> object:
        return self._hashes[index + 1]


def _check_mode(batch: Batch) -> None:
    """Assert that the mode is right for the adapters of the items."""
    adapters = {item.adapter for item in batch.items}
    if not batch.items:
        return
    if batch.mode is Mode.MERGED:
        assert adapters == {batch.merged_adapter}
    elif batch.mode is Mode.MIXED:
        assert batch.merged_adapter is not None and adapters != {batch.merged_adapter}
    else:
        assert batch.merged_adapter is None and adapters != {None}
