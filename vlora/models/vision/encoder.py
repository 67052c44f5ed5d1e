"""Image and video embeddings: the vision tower runs once per content, and its results are cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

import atmm
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.processing import to_tensor
from vlora.types import VisionInput


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
