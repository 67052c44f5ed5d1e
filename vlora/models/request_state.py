"""A request's tensors while it lives in the runner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlora.errors import BadRequest
from vlora.models.grammar import Cursor
from vlora.models.hf_adapter import Positions, VisionFeatures
from vlora.models.processing import to_tensor
from vlora.models.sampling import seed_of
from vlora.types import Request, VisionInput


@dataclasses.dataclass(frozen=True)
class Visual:
    """Embeddings of a prompt's images and videos (all, or the later ones), in the order of their placeholder tokens.

    before: [n + 1], how many of these placeholders stand before each token. features [placeholders, hidden]; deepstack:
    the same rows once per level (Qwen3-VL).
    """

    before: np.ndarray
    features: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @classmethod
    def build(
        cls, request: Request, places: Sequence[np.ndarray], features: Sequence[VisionFeatures], device: torch.device
    ) -> Visual:
        """places: of each item of `features`, its placeholders' indices in the prompt.

        Raises BadRequest when placeholders and embeddings do not match in number.
        """
        for own, made in zip(places, features, strict=True):
            if len(own) != len(made.rows):
                raise BadRequest(
                    f"an image or video of request {request.request_id!r} makes {len(made.rows)} embeddings, but fills "
                    f"{len(own)} placeholder tokens"
                )
        joined = np.concatenate(places)
        is_visual = np.zeros(len(request.prompt_ids), dtype=bool)
        is_visual[joined] = True
        slots = torch.from_numpy(np.argsort(joined)).to(device)
        levels = range(len(features[0].deepstack))
        return cls(
            before=np.concatenate([[0], is_visual.cumsum()]),
            features=torch.cat([f.rows for f in features]).index_select(0, slots),
            deepstack=tuple(torch.cat([f.deepstack[i] for f in features]).index_select(0, slots) for i in levels),
        )


class RequestState:
    """tokens: prompt and answer so far. Positions and visuals are there once the request has been prepared.

    head_logits: of the tokens that the request's head reads, [tokens, outputs] on the host, as far as they have been
    computed; None before the first of them. placeholders: token id by kind of visual item. features: embeddings by
    place in `Request.vision`, held until all of them are in `visual`.
    """

    def __init__(self, request: Request, vision_key: str | None, placeholders: Mapping[str, int]) -> None:
        self.request = request
        self.vision_key = vision_key
        self.tokens: list[int] = list(request.prompt_ids)
        self.seed = seed_of(request.request_id, request.sampling)
        self.cursor: Cursor | None = None  # in its grammar; it moves with tokens, which a preemption keeps
        self.positions: Positions | None = None
        self.visual: Visual | None = None
        self.features: dict[int, VisionFeatures] = {}
        self.head_logits: torch.Tensor | None = None
        self.places = _places(request, placeholders)
        self._last = [int(own[-1]) if len(own) else len(request.prompt_ids) for own in self.places]
        self._visual_from = len(request.prompt_ids) + 1  # images and videos that reach this token are there
        self._block_table: tuple[int, ...] = ()
        self._rows = np.empty(0, dtype=np.int64)

    def prepared(self, start: int) -> bool:
        """Whether everything is there to compute tokens from `start` on."""
        return self.positions is not None and all(last < start or last >= self._visual_from for last in self._last)

    def visible(self, start: int) -> list[int]:
        """Which images and videos are needed from token `start` on: what lies wholly before it is in the KV cache."""
        return [i for i, last in enumerate(self._last) if last >= start]

    @property
    def visual_tokens(self) -> np.ndarray:
        """Indices in the prompt of all image and video tokens, in order."""
        return np.sort(np.concatenate(self.places)) if self.places else np.empty(0, dtype=np.int64)

    @functools.cached_property
    def head_tokens(self) -> np.ndarray:
        """Indices in the prompt of the tokens that the request's head reads, in order; none without a head."""
        if self.request.head is None:
            return np.empty(0, dtype=np.int64)
        if self.request.read_from is None:
            return np.array([len(self.request.prompt_ids) - 1])
        return self.visual_tokens

    def visuals_in_order(self) -> list[VisionInput]:
        """Images and videos in the order of their tokens."""
        order = sorted(range(len(self.places)), key=lambda i: self.places[i][0])
        return [self.request.vision[i] for i in order]

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    def prepare(self, positions: Positions, visual: Visual | None, start: int) -> None:
        """Everything needed from token `start` on is there."""
        self.positions, self.visual, self._visual_from = positions, visual, start
        if len(self.visible(start)) == len(self._last):
            self.features.clear()  # `visual` has a copy of all of them, whatever token is computed next

    def grids(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        """The small tensors positions depend on, per image or video; pixels are left out."""
        return [
            (item.kind, {name: to_tensor(value) for name, value in item.fields.items() if "pixel" not in name})
            for item in self.request.vision
        ]

    def kv_rows(self, block_table: tuple[int, ...], block_size: int, block_rows: int) -> np.ndarray:
        """Base row of every token slot of the table, int64 [len(table) * block_size]; kept until the table changes."""
        if block_table != self._block_table:
            first = np.asarray(block_table, dtype=np.int64) * block_rows
            self._rows = (first[:, None] + np.arange(block_size)).reshape(-1)
            self._block_table = block_table
        return self._rows


def _places(request: Request, placeholders: Mapping[str, int]) -> list[np.ndarray]:
    """Indices of each image's or video's placeholder tokens in the prompt; each kind's tokens belong to its items in
    order."""
    if not request.vision:
        return []
    ids = np.asarray(request.prompt_ids)
    left = {kind: np.flatnonzero(ids == token) for kind, token in placeholders.items()}
    places = []
    for item in request.vision:
        of_kind = left.get(item.kind, ids[:0])
        places.append(of_kind[: item.num_tokens])
        left[item.kind] = of_kind[item.num_tokens :]
    return places
