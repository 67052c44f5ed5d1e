"""A request's tensors while it lives in the runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from vlora.errors import BadRequest
from vlora.models.processing import to_tensor
from vlora.models.sampling import seed_of
from vlora.models.seam import Positions, Seam, VisionFeatures
from vlora.types import Request


@dataclasses.dataclass(frozen=True)
class Visual:
    """A prompt's image and video embeddings, in the order of their placeholder tokens.

    before: [n + 1], how many placeholders stand before each token. features [placeholders, hidden]; deepstack: the same
    rows once per level (Qwen3-VL).
    """

    before: np.ndarray
    features: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @classmethod
    def build(cls, seam: Seam, request: Request, features: Sequence[VisionFeatures]) -> Visual | None:
        """Raises BadRequest when placeholders and embeddings do not match in number."""
        if not request.vision:
            return None
        ids = np.asarray(request.prompt_ids)
        token_of = {"image": seam.image_token_id, "video": seam.video_token_id}
        is_visual = np.zeros(len(ids), dtype=bool)
        where: dict[str, np.ndarray] = {}
        for kind in ("image", "video"):
            where[kind] = ids == token_of[kind] if token_of[kind] is not None else np.zeros(len(ids), dtype=bool)
            is_visual |= where[kind]
        levels = len(features[0].deepstack)
        slots = torch.empty(int(is_visual.sum()), dtype=torch.int64)
        joined: list[VisionFeatures] = []
        count = 0
        for kind in ("image", "video"):
            own = [f for item, f in zip(request.vision, features, strict=True) if item.kind == kind]
            made = sum(len(f.rows) for f in own)
            if made != int(where[kind].sum()):
                raise BadRequest(
                    f"the prompt has {int(where[kind].sum())} {kind} placeholder tokens, but its "
                    f"{len(own)} {kind}s make {made} embeddings"
                )
            slots[torch.from_numpy(where[kind][is_visual])] = torch.arange(count, count + made)
            count += made
            joined += own
        slots = slots.to(seam.device)
        return cls(
            before=np.concatenate([[0], is_visual.cumsum()]),
            features=torch.cat([f.rows for f in joined]).index_select(0, slots),
            deepstack=tuple(
                torch.cat([f.deepstack[level] for f in joined]).index_select(0, slots) for level in range(levels)
            ),
        )


class RequestState:
    """tokens: prompt and answer so far. Positions and visuals are there once the request has been prepared."""

    def __init__(self, request: Request, vision_key: str | None) -> None:
        self.request = request
        self.vision_key = vision_key
        self.tokens: list[int] = list(request.prompt_ids)
        self.seed = seed_of(request.request_id, request.sampling)
        self.positions: Positions | None = None
        self.visual: Visual | None = None
        self._block_table: tuple[int, ...] = ()
        self._rows = np.empty(0, dtype=np.int64)

    @property
    def prepared(self) -> bool:
        return self.positions is not None

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    def prepare(self, positions: Positions, visual: Visual | None) -> None:
        self.positions, self.visual = positions, visual

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
