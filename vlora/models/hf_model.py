"""The only interface to transformers: everything the engine relies on inside the models' published code.

The models run unmodified. The engine uses attention registered by name, the text model called directly with an
additional keyword that its layers pass on, the vision tower's feature functions, and M-RoPE's position function. If a
later version changes one of these, the checks in `HFModel.__init__` fail at startup instead of during a request.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

import atmm
from atmm.quantized import StoredLinear
from vlora.errors import BadRequest, UnsupportedModel
from vlora.lora.adapted_linear import AdaptedLinear, LaneScope, adapt
from vlora.lora.own_layers import OwnLayers
from vlora.memory.arena import in_huge_pages
from vlora.models.attention import StepAttention, paged_attention
from vlora.models.families import Family, family_of
from vlora.models.fused_layers import (
    FusedLayers,
    convert_patch_embeddings,
    fuse_gates,
    fuse_gelus,
    fuse_norms,
    fuse_rotations,
)
from vlora.models.supported import max_positions
from vlora.models.vision.stepwise_tower import pace, register_vision_attention

# Must not contain "flash" or "sdpa": transformers tests attention names for those substrings.
ATTENTION_NAME = "vlora_paged"

_IMAGE, _VIDEO = 1, 2  # token types of transformers' mm_token_type_ids


@dataclasses.dataclass(frozen=True)
class VisionFeatures:
    """Embeddings of one image or video: rows [num_tokens, hidden], and one such tensor per Qwen3-VL deepstack level."""

    rows: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.rows, *self.deepstack))


@dataclasses.dataclass(frozen=True)
class VisualRows:
    """Rows of a packed batch with features of images and videos, which `place` writes over their embeddings.

    index: int64 [n] on the model's device. features: [n, hidden]. levels: additional ones, for each deepstack level.
    """

    index: torch.Tensor
    features: torch.Tensor
    levels: list[torch.Tensor]

    def place(self, embeddings: torch.Tensor) -> None:
        embeddings.index_copy_(0, self.index, self.features)


class HFModel:
    """A loaded transformers model with its attention replaced and its linear layers converted by `adapt`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self.text_config = model.config.text_config
        self.family: Family = family_of(model.config)
        self.inner = model.model
        self.text_model = self.inner.language_model
        self.lm_head: StoredLinear = model.get_output_embeddings()
        self.lm_head.__class__ = StoredLinear
        self.lm_head.weight.data = in_huge_pages(self.lm_head.weight.data)  # read completely in every step
        self.embed: nn.Embedding = model.get_input_embeddings()
        self.own = OwnLayers(model, self.lm_head, self.embed)
        self.image_token_id: int = model.config.image_token_id
        self.video_token_id: int | None = getattr(model.config, "video_token_id", None)
        weight = self.embed.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        model.set_attn_implementation({"text_config": ATTENTION_NAME})
        if self.text_model.config._attn_implementation != ATTENTION_NAME:  # noqa: SLF001
            raise UnsupportedModel(
                f"{self.family.model_type}: this version of transformers does not accept a registered attention "
                "function for its text model"
            )
        heads = self.text_config.num_attention_heads
        self.head_dim: int = getattr(self.text_config, "head_dim", None) or self.hidden_size // heads
        self.num_kv_heads: int = self.text_config.num_key_value_heads  # with several ranks: of this rank
        self.language_scope, self.vision_scope = LaneScope(), LaneScope()
        self._sdpa_tower = getattr(self.config.vision_config, "_attn_implementation", None) == "sdpa"
        self._replace_vision_attention()
        fuse_norms(model)
        convert_patch_embeddings(model)
        self.language_linears, self.vision_linears = self._adapt_linears()
        self._fuse_layers()
        self.fused_layers = FusedLayers.of(self.text_model, self.head_dim, mrope=self.family.mrope)

    def move(self, device: torch.device) -> None:
        self.model.to(device)
        self.device = self.embed.weight.device
        self._replace_vision_attention()
        self._fuse_layers()

    # -- shapes ---------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.text_config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_positions(self) -> int:
        return max_positions(self.text_config)

    @property
    def placeholders(self) -> dict[str, int]:
        """Token ids of the placeholders for one embedding of an image and, if the family accepts videos, of a video."""
        ids = {"image": self.image_token_id, "video": self.video_token_id}
        return {kind: token for kind, token in ids.items() if token is not None}

    @property
    def eos_ids(self) -> frozenset[int]:
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        if eos is None:
            eos = getattr(self.text_config, "eos_token_id", None)
        ends = () if eos is None else [eos] if isinstance(eos, int) else eos
        return frozenset((*ends, *getattr(self.config, "turn_end_ids", ())))

    def _adapt_linears(self) -> tuple[dict[str, AdaptedLinear], dict[str, AdaptedLinear]]:
        language: dict[str, AdaptedLinear] = {}
        vision: dict[str, AdaptedLinear] = {}
        for name, module in list(self.model.named_modules()):
            if type(module) is not nn.Linear or module is self.lm_head:
                continue
            if name.startswith("model.language_model."):
                language[name] = adapt(module, name, self.language_scope)
            else:
                vision[name] = pace(adapt(module, name, self.vision_scope))
        return language, vision

    def _fuse_layers(self) -> None:
        """Use one kernel per operation in the layers, on devices that have these kernels."""
        if atmm.serves_pointwise(self.device, self.dtype):
            fuse_gates(self.model)
            fuse_rotations(self.model)
            fuse_gelus(self.model)

    def _replace_vision_attention(self) -> None:
        """Use the device's attention in the vision tower, if the tower has scaled-dot-product attention."""
        if self._sdpa_tower:  # encoding is otherwise interrupted at linear layers only
            self.model.set_attn_implementation({"vision_config": register_vision_attention(self.device)})

    # -- vision ---------------------------------------------------------------------------------------------------

    def num_units(self, kind: str, fields: dict[str, torch.Tensor]) -> int:
        """The number of units in one item: patches for Qwen, tiles for LLaVA. Lanes are ranges of units."""
        if self.family.mrope:
            return int(fields["image_grid_thw" if kind == "image" else "video_grid_thw"].prod())
        if kind == "video":
            return fields["pixel_values_videos"].shape[1]
        return fields["pixel_values"].shape[1] if self.family.tiles else 1

    def group_of(self, kind: str, fields: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        """A key of the item; items with equal keys may share one call of `encode`."""
        if kind == "video" and not self.family.mrope:
            return (kind, tuple(fields["pixel_values_videos"].shape))
        untiled = self.family.model_type == "llava_onevision" and int(fields["batch_num_images"][0]) > 1
        return (kind, untiled) if kind == "image" and self.family.model_type == "llava_onevision" else (kind,)

    def encode(self, kind: str, items: Sequence[dict[str, torch.Tensor]]) -> list[VisionFeatures]:
        """Run the vision tower over several items of one kind and group in one call. `vision_scope` has the lanes."""
        fields = {name: _stack([item[name] for item in items]).to(self.device) for name in items[0]}
        if kind == "video":
            if not self.family.video:
                raise BadRequest(f"{self.family.model_type} accepts images, not videos; send frames as images")
            names: tuple[str, ...] = ("pixel_values_videos", "video_grid_thw")
            call = self.inner.get_video_features
        else:
            names = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
            call = self.inner.get_image_features
            if "batch_num_images" in fields:
                # One number covers a request's images; any number above one disables tiling for all of them.
                single = int(items[0]["batch_num_images"][0]) == 1
                fields["batch_num_images"] = (
                    torch.ones(len(items), dtype=torch.long) if single else torch.tensor([max(len(items), 2)])
                )
        arguments = {name: fields[name] for name in names if name in fields}
        pixels = names[0]
        # Positional, because the argument's name differs between versions.
        out = call(arguments.pop(pixels).to(self.dtype), **arguments, return_dict=True)
        rows = [item.reshape(-1, self.hidden_size) for item in out.pooler_output]
        if kind == "video" and not self.family.mrope:
            rows = [self._ended_by_newline(item, fields[pixels].shape[1]) for item in rows]
        counts = [len(item) for item in rows]
        levels = getattr(out, "deepstack_features", None) or ()
        # Some versions return a tensor per level, others a tuple of per-item tensors.
        joined = [torch.cat(list(level)) if not isinstance(level, torch.Tensor) else level for level in levels]
        split = [level.split(counts) for level in joined]
        return [
            VisionFeatures(rows[i].to(self.dtype), tuple(level[i].to(self.dtype) for level in split))
            for i in range(len(items))
        ]

    def _ended_by_newline(self, clip: torch.Tensor, num_frames: int) -> torch.Tensor:
        """A clip's features [tokens, hidden] with the final newline embedding.

        Older versions of transformers add it at a later stage.
        """
        vision = self.config.vision_config
        side = math.ceil(vision.image_size // vision.patch_size / 2)  # frames are pooled two by two
        if len(clip) > num_frames * side * side:
            return clip
        return torch.cat([clip, self.inner.image_newline[None].to(clip)])

    # -- positions ------------------------------------------------------------------------------------------------

    def positions(self, prompt_ids: torch.Tensor, fields: Sequence[tuple[str, dict[str, torch.Tensor]]]) -> Positions:
        """M-RoPE positions of one prompt [n] with its images and videos; a single row for families without M-RoPE."""
        num_tokens = len(prompt_ids)
        if not self.family.mrope or not fields:
            rows = 3 if self.family.mrope else 1
            return Positions(torch.arange(num_tokens).expand(rows, -1).numpy())
        types = torch.zeros_like(prompt_ids)
        types[prompt_ids == self.image_token_id] = _IMAGE
        types[prompt_ids == self.video_token_id] = _VIDEO
        grids: dict[str, list[torch.Tensor]] = {}
        for _, item in fields:
            for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
                if name in item:
                    grids.setdefault(name, []).append(item[name])
        positions, _ = self.inner.get_rope_index(
            prompt_ids[None],
            mm_token_type_ids=types[None].int(),
            **{name: torch.cat(values) for name, values in grids.items()},
        )
        return Positions(positions[:, 0].cpu().numpy())

    # -- language model -------------------------------------------------------------------------------------------

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        step: StepAttention,
        visuals: VisualRows | None = None,
    ) -> torch.Tensor:
        """Run the text model on packed embeddings [T, hidden] and positions [1 or 3, T].

        Returns:
            Hidden states [T, hidden] after the final norm.
        """
        rotary = positions[:, None] if self.family.mrope else positions
        plain = embeddings.is_cpu and not (visuals and visuals.levels) and not torch.is_grad_enabled()
        if plain and self.fused_layers is not None:
            return self.fused_layers(embeddings, rotary, step)
        extra: dict[str, Any] = {}
        if visuals is not None and visuals.levels:
            mask = embeddings.new_zeros(1, len(embeddings), dtype=torch.bool).index_fill_(1, visuals.index, True)
            extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": visuals.levels}
        return self.text_model(
            inputs_embeds=embeddings[None],
            position_ids=rotary,
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
            vlora_step=step,
            **extra,
        ).last_hidden_state[0]


@dataclasses.dataclass(frozen=True)
class Positions:
    """Rotary positions of a prompt, int64 [1 or 3, n].

    The answer continues each row from the prompt's last token, as in transformers' `generate`. The delta of
    `get_rope_index` continues from the largest position, which a long video's time index may be.
    """

    rows: np.ndarray

    @functools.cached_property
    def delta(self) -> np.ndarray:
        """Per row, the difference between the position and the index of a token after the prompt: [1 or 3, 1]."""
        return self.rows[:, -1:] - (self.rows.shape[1] - 1)

    def span(self, start: int, stop: int) -> np.ndarray:
        """Positions of tokens [start, stop) of prompt and answer, [1 or 3, stop - start]."""
        known = self.rows.shape[1]
        if start >= known:
            return np.arange(start, stop) + self.delta
        return np.concatenate([self.rows[:, start:stop], np.arange(known, stop) + self.delta], 1)


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along dimension 0. Tiled images [1, tiles, ...] are first zero-padded to the largest tile count."""
    if tensors[0].ndim == 5:
        most = max(t.shape[1] for t in tensors)
        tensors = [torch.cat([t, t.new_zeros(1, most - t.shape[1], *t.shape[2:])], 1) for t in tensors]
    return torch.cat(list(tensors))
