"""Image and video embeddings: the vision tower runs once per content, and its results are cached.

The images of requests are encoded as scheduled, ahead of the step that needs them, or at the latest in that step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

import atmm
from vlora.errors import BadRequest, StepFailed, VLoraError
from vlora.models.families import patch_flops
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.processing import to_tensor
from vlora.models.request_state import RequestState, Visual
from vlora.models.vision.stepwise_tower import PacedCall
from vlora.parallel.process_group import ProcessGroup
from vlora.types import BatchItem, Encode, Encoded, ErrorValue, VisionInput

log = logging.getLogger(__name__)

_ELSEWHERE = ErrorValue.of(StepFailed("its images could not be encoded on another rank"))


class VisionTask(NamedTuple):
    """One item to encode, and the key of the adapter with vision-side deltas that applies to it, or None."""

    item: VisionInput
    adapter_key: str | None

    @property
    def cache_key(self) -> tuple[str, str | None]:
        return self.item.content_hash, self.adapter_key


class VisionEncoder:
    """Runs the vision tower for many requests at once and caches embeddings by content and vision-side adapter."""

    def __init__(self, hf_model: HFModel, cache_bytes: int) -> None:
        self._hf_model = hf_model
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[str, str | None], VisionFeatures] = OrderedDict()
        self.num_bytes = 0  # size of the cache's content
        self.num_hits = 0
        self.num_encoded = 0

    def is_cached(self, key: tuple[str, str | None]) -> bool:
        """Whether the embeddings of a content with an adapter's vision-side deltas are cached."""
        return key in self._cache

    def encode(self, tasks: Sequence[VisionTask]) -> list[VisionFeatures]:
        found: dict[tuple[str, str | None], VisionFeatures] = {}
        missing: dict[tuple[str, str | None], VisionTask] = {}
        for task in tasks:
            if task.cache_key in self._cache:
                self._cache.move_to_end(task.cache_key)
                found[task.cache_key] = self._cache[task.cache_key]
                self.num_hits += 1
            else:
                missing[task.cache_key] = task
        groups: dict[tuple[object, ...], list[tuple[VisionTask, dict[str, torch.Tensor]]]] = {}
        for task in missing.values():
            fields = {name: to_tensor(value) for name, value in task.item.fields.items()}
            groups.setdefault(self._hf_model.group_of(task.item.kind, fields), []).append((task, fields))
        for members in groups.values():
            # Items of one adapter are adjacent, which gives fewer lanes.
            members.sort(key=lambda member: member[0].adapter_key or "")
            for (task, _), features in zip(members, self._run(members), strict=True):
                found[task.cache_key] = features
                self._keep(task.cache_key, features)
        return [found[task.cache_key] for task in tasks]

    def forget(self, adapter_key: str) -> None:
        """Evict the embeddings that were computed with an adapter."""
        for key in [key for key in self._cache if key[1] == adapter_key]:
            self.num_bytes -= self._cache.pop(key).num_bytes

    def _run(self, members: list[tuple[VisionTask, dict[str, torch.Tensor]]]) -> list[VisionFeatures]:
        kind = members[0][0].item.kind
        lanes: list[atmm.Lane] = []
        start = 0
        for task, fields in members:
            stop = start + self._hf_model.num_units(kind, fields)
            if task.adapter_key is not None:
                if lanes and lanes[-1].key == task.adapter_key and lanes[-1].stop == start:
                    lanes[-1] = lanes[-1]._replace(stop=stop)
                else:
                    lanes.append(atmm.Lane(task.adapter_key, start, stop, 1.0))
            start = stop
        self.num_encoded += len(members)
        with self._hf_model.vision_scope.lanes(start, lanes):
            return self._hf_model.encode(kind, [fields for _, fields in members])

    def _keep(self, key: tuple[str, str | None], features: VisionFeatures) -> None:
        if features.num_bytes > self._cache_bytes:
            return
        self._cache[key] = features
        self.num_bytes += features.num_bytes
        while self.num_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


@dataclasses.dataclass(eq=False)
class ImageEncoding:
    """Manages the running call of the vision tower, and gives requests their embeddings.

    Args:
        states: The runner's requests. The runner adds and removes them.
        group: The ranks that encode the same images. If images fail on one rank, their request fails on all.
    """

    hf_model: HFModel
    vision: VisionEncoder
    states: Mapping[str, RequestState]
    group: ProcessGroup | None

    def __post_init__(self) -> None:
        self._patch_flops = patch_flops(self.hf_model.config)
        self._call: _Call | None = None
        self._last_done = 0  # number of the last completed call

    def release(self, request_id: str) -> None:
        """Handle the end of a request: abandon a running call that serves no other request."""
        if self._call is not None and all(state.request.request_id == request_id for state, _ in self._call.alive()):
            self._abandon()

    def advance(self, encode: Encode) -> tuple[Encoded, dict[str, ErrorValue]]:
        """Run one step's share of a call.

        Returns:
            The progress without its seconds, and the error by request id if the call was for a single request and has
            failed.
        """
        if encode.number == self._last_done:
            return Encoded(num_patches=0.0, done=True), {}  # reported again after a failed step
        if self._call is None or self._call.number != encode.number:
            self._abandon()
            self._call = _Call(encode, self.states, self.vision)
        call = self._call
        flops = call.running.flops
        error: Exception | None = None
        done = False
        try:
            done = call.running.advance(encode.budget * self._patch_flops)
        except Exception as raised:
            error = raised
        num_patches = (call.running.flops - flops) / self._patch_flops
        fine = error is None
        if self.group is not None:
            # Ranks with different numbers of threads use different pieces: the call is done when all ranks are done.
            fine, done = map(bool, self.group.smallest([fine, done], "images"))
        if not fine:
            self._abandon()
            requests = {state.request.request_id: state for state, _ in call.items}
            log.warning("encoding images of %d requests failed: %s", len(requests), error or "on another rank")
            errors = {
                request_id: _ELSEWHERE if error is None else _error_of(state, error)
                for request_id, state in requests.items()
                if len(requests) == 1
            }
            return Encoded(num_patches=num_patches, failed=True), errors
        if done:
            self._call, self._last_done = None, encode.number
            for (state, index), features in zip(call.items, call.running.result, strict=True):
                state.features[index] = features
        return Encoded(num_patches=num_patches, done=done), {}

    def prepare(self, items: Sequence[BatchItem]) -> dict[str, ErrorValue]:
        """Give starting requests their embeddings and positions.

        Missing images are encoded here, in as few calls as possible: after prefix-cache blocks were evicted within a
        step, and if no scheduler planned the encoding. Images with reused KV are not encoded.

        Returns:
            Errors by request id.
        """
        new = [
            (state, item.start) for item in items if not (state := self.states[item.request_id]).prepared(item.start)
        ]
        if not new:
            return {}
        errors: dict[str, ErrorValue] = {}
        with self.hf_model.vision_scope.suspended():
            try:
                self._encode(new)
            except Exception as together:
                log.warning("encoding a batch of images failed (%s); encoding each request separately", together)
                for state, start in new:
                    try:
                        self._encode([(state, start)])
                    except Exception as error:
                        errors[state.request.request_id] = _error_of(state, error)
        seen = [state.request.request_id for state, _ in new if state.request.vision]
        return errors if self.group is None or not seen else self._agree(self.group, seen, errors)

    @staticmethod
    def _agree(group: ProcessGroup, seen: Sequence[str], errors: dict[str, ErrorValue]) -> dict[str, ErrorValue]:
        """Fail a request with images on all ranks if it fails on any, since all ranks must run the same batch."""
        fine = group.smallest([request_id not in errors for request_id in seen], "images")
        failed = [request_id for request_id, is_fine in zip(seen, fine, strict=True) if not is_fine]
        return {**dict.fromkeys(failed, _ELSEWHERE), **errors}

    def _encode(self, starting: Sequence[tuple[RequestState, int]]) -> None:
        needed = [state.visible(start) for state, start in starting]
        missing = [
            (state, i)
            for (state, _), items in zip(starting, needed, strict=True)
            for i in items
            if i not in state.features
        ]
        for (state, i), features in zip(missing, self.vision.encode(_tasks(missing)), strict=True):
            state.features[i] = features
        for (state, start), items in zip(starting, needed, strict=True):
            own = [state.features[i] for i in items]
            places = [state.places[i] for i in items]
            visual = Visual.build(state.request, places, own, self.hf_model.device) if own else None
            ids = torch.tensor(state.request.prompt_ids)
            state.prepare(self.hf_model.positions(ids, state.grids()), visual, start)

    def _abandon(self) -> None:
        if self._call is not None:
            self._call.running.close()
            self._call = None


class _Call:
    def __init__(self, encode: Encode, states: Mapping[str, RequestState], vision: VisionEncoder) -> None:
        self.number = encode.number
        self.items = [(states[request_id], index) for request_id, index in encode.items if request_id in states]
        self._states = states
        tasks = _tasks(self.items)
        self.running: PacedCall[list[VisionFeatures]] = PacedCall(lambda: vision.encode(tasks))

    def alive(self) -> list[tuple[RequestState, int]]:
        return [(state, i) for state, i in self.items if self._states.get(state.request.request_id) is state]


def _tasks(items: Sequence[tuple[RequestState, int]]) -> list[VisionTask]:
    return [VisionTask(state.request.vision[i], state.vision_key) for state, i in items]


def _error_of(state: RequestState, error: Exception) -> ErrorValue:
    if isinstance(error, VLoraError):
        return ErrorValue.of(error)
    return ErrorValue.of(
        BadRequest(
            f"the images of request {state.request.request_id} cannot be encoded: {type(error).__name__}: {error}"
        )
    )
