"""Selects the images to encode in a step, within a budget relative to the step's tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from vlora.orchestrator.cost_model import Costs, StepSize
from vlora.orchestrator.request_state import Image, TrackedRequest
from vlora.types import Batch, Encode, Encoded, RequestStatus

SHARE = 0.5  # encoding time per step with tokens, relative to their time: limits the delay of decoding
ALONE_S = 0.1  # encoding time per step without tokens: limits the delay of new requests
_MAX_AHEAD = 4  # steps' tokens of embeddings held for requests that have not started

ContentKey = tuple[str, str | None]
"""An image's content hash, and the key of the adapter that applies vision-side deltas to it."""


class _EncodeCall(NamedTuple):
    """One call of the vision tower. `items` lists (request, image) in order of selection."""

    number: int
    items: tuple[tuple[TrackedRequest, Image], ...]
    total: float


class _HeldEmbeddings(NamedTuple):
    """Embeddings held for a request that has not started. `adapter` is the one it needs to start."""

    num_tokens: int
    adapter: str | None


class EncodeQueue:
    """Schedules the vision tower: one call at a time, spread over several steps if it is large.

    A request is ready once the embeddings of all images with tokens to compute are held for it or cached; images
    covered by reused prefixes are not encoded. Images are encoded in request order and ahead of need, as long as the
    embeddings held for requests that have not started stay within four steps' tokens. A single request may always
    exceed this limit. So may a request with a resident adapter while all requests that hold embeddings wait for their
    adapters: the adapter that it keeps resident may block theirs.

    Args:
        placeholders: token id by kind of visual item ("image", "video").
        is_cached: whether the embeddings of a content are cached, so that encoding it is free.
    """

    def __init__(
        self, placeholders: Mapping[str, int], is_cached: Callable[[ContentKey], bool], max_step_tokens: int
    ) -> None:
        self._placeholders = placeholders
        self._is_cached = is_cached
        self._max_ahead = _MAX_AHEAD * max_step_tokens
        self._vision_key: dict[str, str | None] = {}  # for requests with images
        self._ahead: dict[str, _HeldEmbeddings] = {}  # by request
        self._alone: set[str] = set()  # to encode alone: a shared call with their images failed
        self._call: _EncodeCall | None = None
        self._left = 0.0  # patches left of the call
        self._debt = 0.0  # patches by which the last step exceeded its budget
        self._num_calls = 0

    def add(self, tracked: TrackedRequest, vision_key: str | None) -> None:
        """Register the images of a request.

        Args:
            vision_key: the key of its adapter, if that adapter changes the vision side.
        """
        request = tracked.request
        if not request.vision:
            return
        self._vision_key[tracked.request_id] = vision_key
        places = {
            kind: [place for place, token in enumerate(request.prompt_ids) if token == placeholder]
            for kind, placeholder in self._placeholders.items()
        }
        next_place = dict.fromkeys(places, 0)
        for index, item in enumerate(request.vision):
            own = places.get(item.kind, [])
            stop = next_place.get(item.kind, 0) + item.num_tokens
            next_place[item.kind] = stop
            last = own[stop - 1] if 0 < stop <= len(own) else tracked.prompt_len
            key = (item.content_hash, vision_key)
            tracked.images.append(Image(index, key, max(1, item.num_patches), item.num_tokens, last))

    def remove(self, request_id: str) -> None:
        self._vision_key.pop(request_id, None)
        self._ahead.pop(request_id, None)
        self._alone.discard(request_id)
        if self._call is not None and all(t.request_id not in self._vision_key for t, _ in self._call.items):
            self._call = None

    def is_ready(self, tracked: TrackedRequest) -> bool:
        """Whether a request can compute its next token."""
        return not tracked.images or not self._missing(tracked)

    def patches_left(self, tracked: TrackedRequest) -> float:
        """Patches to encode before a request is ready.

        Excludes work that the current call has already done on images shared with other requests.
        """
        if not tracked.images:
            return 0.0
        missing = self._missing(tracked)
        left = sum([image.num_patches for image in missing])
        if self._call is not None and left:
            under_way = {image.key: image.num_patches for _, image in self._call.items}
            shared = sum([under_way[image.key] for image in missing if image.key in under_way])
            left -= shared * (1 - self._left / self._call.total)
        return left

    def mark_started(self, tracked: TrackedRequest, start: int) -> None:
        """Mark that a request computes tokens from `start` on.

        The runner holds the images of these tokens until the request ends.
        """
        if tracked.images:
            tracked.images = [image for image in tracked.images if image.last < start]
        self._ahead.pop(tracked.request_id, None)

    @property
    def adapters_encoding(self) -> Set[str]:
        """Adapters with deltas on images of the current call. Evicting one would discard the call's work."""
        return frozenset() if self._call is None else _adapters(self._call.items)

    def choose(
        self, waiting: Iterable[TrackedRequest], resident: Set[str], budget: float, *, alone: bool
    ) -> Encode | None:
        """Select the encoding work of a step.

        Args:
            waiting: requests that are not ready, most urgent first.
            resident: adapters in memory; images that need the deltas of other adapters wait.
            alone: the step has no tokens, so an earlier excess over the budget delays no request.
        """
        if self._call is not None and not _adapters(self._call.items) <= resident:
            self._call = None  # its deltas were evicted, so the call cannot continue
        if self._call is None:
            self._call = self._next_call(waiting, resident, budget)
            if self._call is None:
                return None
            self._left = self._call.total
        if not alone:
            budget -= self._debt
            if budget <= 0:
                self._debt = -budget
                return None
        self._debt = 0.0
        items = tuple((t.request_id, image.place) for t, image in self._call.items)
        return Encode(self._call.number, items, budget, self._left)

    def record(self, encode: Encode, encoded: Encoded) -> list[TrackedRequest]:
        """Record the encoding work of a step; return the requests with images in it."""
        call = self._call
        if call is None or call.number != encode.number:
            return []  # all of its requests have ended
        self._debt = max(0.0, encoded.num_patches - encode.budget)
        # The total is an estimate: a call that is not done has work left.
        self._left -= encoded.num_patches
        if self._left <= 0:
            self._left = 0.02 * call.total
        alive = [(t, image) for t, image in call.items if t.request_id in self._vision_key]
        if encoded.done or encoded.failed:
            self._call = None
        if encoded.failed:
            self._alone.update(t.request_id for t, _ in alive)
        if encoded.done:
            for tracked, image in alive:
                if image in tracked.images:
                    tracked.images.remove(image)
                    # A request that started with this image in the prefix cache may have been preempted since. It waits
                    # for KV room, and its embeddings must not block requests that have room.
                    if tracked.entered and tracked.status is RequestStatus.WAITING:
                        held = self._ahead.get(tracked.request_id, _HeldEmbeddings(0, tracked.adapter))
                        self._ahead[tracked.request_id] = _HeldEmbeddings(
                            held.num_tokens + image.num_tokens, tracked.adapter
                        )
        return list(dict.fromkeys(t for t, _ in alive))

    def check_integrity(self, tracked: Collection[str]) -> None:
        """Assert that no state is kept for requests that have ended."""
        assert self._vision_key.keys() <= set(tracked), "an ended request still has images to encode"
        assert self._ahead.keys() <= self._vision_key.keys(), "embeddings are held for an ended request"

    def _missing(self, tracked: TrackedRequest) -> list[Image]:
        start = tracked.cached_len
        return [image for image in tracked.images if image.last >= start and not self._is_cached(image.key)]

    def _next_call(self, waiting: Iterable[TrackedRequest], resident: Set[str], budget: float) -> _EncodeCall | None:
        items: list[tuple[TrackedRequest, Image]] = []
        keys: set[ContentKey] = set()
        total = 0.0
        reserved = sum([held.num_tokens for held in self._ahead.values()])
        stuck = not any(_in_memory(held.adapter, resident) for held in self._ahead.values())
        # First the requests with some images encoded: until they start, their embeddings block others.
        for tracked in sorted(waiting, key=lambda t: t.request_id not in self._ahead):
            request_id = tracked.request_id
            vision_key = self._vision_key[request_id]
            if (vision_key is not None and vision_key not in resident) or (items and request_id in self._alone):
                continue
            missing = self._missing(tracked)
            reserved += sum([image.num_tokens for image in missing])
            if reserved > self._max_ahead and request_id not in self._ahead and (items or self._ahead):
                if items or not stuck:
                    break
                if not _in_memory(tracked.adapter, resident):
                    continue
            for image in missing:
                fresh = image.key not in keys
                if items and fresh and total + image.num_patches > budget:
                    return self._begin(items, total)
                items.append((tracked, image))
                keys.add(image.key)
                total += image.num_patches * fresh
            if request_id in self._alone and items:
                break
        return self._begin(items, total) if items else None

    def _begin(self, items: Sequence[tuple[TrackedRequest, Image]], total: float) -> _EncodeCall:
        self._num_calls += 1
        return _EncodeCall(self._num_calls, tuple(items), total)


def encode_budget(batch: Batch | None, costs: Costs, share: float) -> float:
    """Patches to encode in a step: `share` of the time of its tokens, or `ALONE_S` without tokens."""
    if not costs.patch_s:
        return 1.0  # until a cost was measured
    seconds = ALONE_S if batch is None else share * costs.step_s(StepSize.of(batch))
    return max(1.0, seconds / costs.patch_s)


def _in_memory(adapter: str | None, resident: Set[str]) -> bool:
    return adapter is None or adapter in resident


def _adapters(items: Iterable[tuple[TrackedRequest, Image]]) -> set[str]:
    return {image.key[1] for _, image in items if image.key[1] is not None}
