"""The state and tensors of a request in the runner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlora.errors import BadRequest
from vlora.models.grammar import Cursor
from vlora.models.hf_model import Positions, VisionFeatures
from vlora.models.processing import to_tensor
from vlora.types import Request, VisionInput, seed_of


@dataclasses.dataclass(frozen=True)
class Visual:
    """Embeddings of a prompt's images and videos (all, or the later ones), in the order of their placeholder tokens.

    before: [n + 1], the number of these placeholders before each token. features: [placeholders, hidden]. deepstack:
    the same rows for each level (Qwen3-VL).
    """

    before: np.ndarray
    features: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @classmethod
    def build(
        cls, request: Request, places: Sequence[np.ndarray], features: Sequence[VisionFeatures], device: torch.device
    ) -> Visual:
        """Combine the features of several items.

        Args:
            places: For each item of `features`, the indices of its placeholders in the prompt.

        Raises:
            BadRequest: The numbers of placeholders and embeddings differ.
        """
        for own, made in zip(places, features, strict=True):
            if len(own) != len(made.rows):
                raise BadRequest(
                    f"an image or video of request {request.request_id!r} has {len(made.rows)} embeddings, but "
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
    """A request's tokens, embeddings and intermediate results.

    tokens: prompt and answer so far. positions, visual: set once the request is prepared. head_logits: [tokens,
    outputs] on the host for the tokens that the request's head reads, filled as they are computed; for an embedding
    [1, hidden], the sum of the states read so far; None before the first. features: embeddings by index in
    `Request.vision`, kept until all of them are in `visual`.

    Args:
        vision_key: Key of the adapter that applies to the vision side, or None.
        placeholders: Token id by kind of visual item.
    """

    def __init__(self, request: Request, vision_key: str | None, placeholders: Mapping[str, int]) -> None:
        self.request = request
        self.vision_key = vision_key
        self.tokens: list[int] = [*request.prompt_ids, *request.answered]
        self.seed = seed_of(request.request_id, request.sampling)
        self.cursor: Cursor | None = None  # position in its grammar; a preemption keeps it, like the tokens
        self.positions: Positions | None = None
        self.visual: Visual | None = None
        self.features: dict[int, VisionFeatures] = {}
        self.head_logits: torch.Tensor | None = None
        self.places = _places(request, placeholders)
        self._last = [int(own[-1]) if len(own) else len(request.prompt_ids) for own in self.places]
        self._visual_from = len(request.prompt_ids) + 1  # images and videos that reach this token are in `visual`
        self.block_table: tuple[int, ...] = ()
        self._rows = np.empty(0, dtype=np.int64)

    def prepared(self, start: int) -> bool:
        """Whether all inputs for computing tokens from `start` on are available."""
        return self.positions is not None and all(last < start or last >= self._visual_from for last in self._last)

    def visible(self, start: int) -> list[int]:
        """Indices of the images and videos needed from token `start` on. KV of items wholly before it is cached."""
        return [i for i, last in enumerate(self._last) if last >= start]

    @property
    def visual_tokens(self) -> np.ndarray:
        """Indices in the prompt of all image and video tokens, in order."""
        return np.sort(np.concatenate(self.places)) if self.places else np.empty(0, dtype=np.int64)

    @functools.cached_property
    def head_tokens(self) -> np.ndarray:
        """Indices in the prompt of the tokens that its head or embedding reads, in order; none for a text."""
        if not self.request.in_one_pass:
            return np.empty(0, dtype=np.int64)
        if self.request.pooling == "mean":
            return np.arange(len(self.request.prompt_ids))
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
        """Set the positions and embeddings that are needed from token `start` on."""
        self.positions, self.visual, self._visual_from = positions, visual, start
        if len(self.visible(start)) == len(self._last):
            self.features.clear()  # `visual` has a copy of all of them, whatever token is computed next

    def grids(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        """The small tensors that positions depend on, per image or video, without pixels."""
        return [
            (item.kind, {name: to_tensor(value) for name, value in item.fields.items() if "pixel" not in name})
            for item in self.request.vision
        ]

    def kv_rows(self, block_table: tuple[int, ...], block_size: int, block_rows: int) -> np.ndarray:
        """Base row of every token slot of the table, int64 [len(table) * block_size]; cached for the same table."""
        if block_table != self.block_table:
            first = np.asarray(block_table, dtype=np.int64) * block_rows
            self._rows = (first[:, None] + np.arange(block_size)).reshape(-1)
            self.block_table = block_table
        return self._rows


def _places(request: Request, placeholders: Mapping[str, int]) -> list[np.ndarray]:
    """Indices of each image's or video's placeholder tokens in the prompt, assigned in order within each kind."""
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
