"""Qwen-VL's vision tower, and the resampler that reduces its patches to a fixed number of embeddings.

Modules and parameters have the names of the published checkpoints. Every product is a linear layer, so that adapters
may target it and that it is computed in pieces.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.clip.modeling_clip import eager_attention_forward

from vlora.models.qwen_vl.config import QwenVLVisionConfig


def on_grid(positions: Tensor, num_patches: int) -> Tensor:
    """A learned embedding of a square grid [rows, width], interpolated to the grid of [num_patches, width]."""
    side, target = math.isqrt(len(positions)), math.isqrt(num_patches)
    if side == target:
        return positions
    grid = positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, size=(target, target), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).reshape(num_patches, -1).to(positions.dtype)


class _Attention(nn.Module):
    """Attention in every direction, by the function that transformers has registered for this tower."""

    is_causal = False

    def __init__(self, config: QwenVLVisionConfig, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [b, n, heads, head width], key and value [b, m, heads, head width] -> [b, n, width]."""
        name = self.config._attn_implementation  # noqa: SLF001
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        sides = (side.transpose(1, 2) for side in (query, key, value))
        out, _ = function(self, *sides, None, scaling=query.shape[-1] ** -0.5, is_causal=False)
        return out.reshape(*query.shape[:2], -1)


class _SelfAttention(_Attention):
    def __init__(self, config: QwenVLVisionConfig) -> None:
        super().__init__(config, config.num_attention_heads)
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        # The outputs of in_proj are grouped by head: query, key and value of the first one, then of the second one.
        by_head = self.in_proj(x).view(*x.shape[:2], self.num_heads, -1)
        mixed: Tensor = self.out_proj(self.attend(*by_head.chunk(3, -1)))
        return mixed


class _Mlp(nn.Module):
    def __init__(self, config: QwenVLVisionConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return out


class _Block(nn.Module):
    def __init__(self, config: QwenVLVisionConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attn = _SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class _Blocks(nn.Module):
    def __init__(self, config: QwenVLVisionConfig) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([_Block(config) for _ in range(config.num_hidden_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.resblocks:
            x = block(x)
        return x


class _CrossAttention(_Attention):
    def __init__(self, config: QwenVLVisionConfig) -> None:
        super().__init__(config, config.num_pool_heads)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.output_dim, config.output_dim) for _ in range(4)
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sides = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        out: Tensor = self.out_proj(self.attend(*(side.unflatten(-1, (self.num_heads, -1)) for side in sides)))
        return out


class _Resampler(nn.Module):
    """Learned queries that attend to the patches of an image. pos_embed: sines and cosines of the queries' grid."""

    def __init__(self, config: QwenVLVisionConfig) -> None:
        super().__init__()
        width = config.output_dim
        self.query = nn.Parameter(torch.zeros(config.num_queries, width))
        self.pos_embed = nn.Parameter(torch.zeros(config.num_queries, width), requires_grad=False)
        # A tower as wide as the language model has no projection between them.
        same = config.hidden_size == width
        self.kv_proj = nn.Identity() if same else nn.Linear(config.hidden_size, width, bias=False)
        self.attn = _CrossAttention(config)
        self.ln_q = nn.LayerNorm(width, config.layer_norm_eps)
        self.ln_kv = nn.LayerNorm(width, config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Patches [b, n, tower width] -> [b, num_queries, output_dim]."""
        value = self.ln_kv(self.kv_proj(x))
        key = value + on_grid(self.pos_embed, x.shape[1])
        query = self.ln_q(self.query) + self.pos_embed
        # Repeated, because adapters of several requests may apply to the images of a call.
        out: Tensor = self.attn(query.expand(len(x), -1, -1), key, value)
        return out


class QwenVLVisionTower(PreTrainedModel):
    """Pixels [b, 3, image_size, image_size] -> embeddings [b, num_queries, output_dim]."""

    config_class = QwenVLVisionConfig
    main_input_name = "pixel_values"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: QwenVLVisionConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.conv1 = nn.Conv2d(3, width, config.patch_size, config.patch_size, bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(config.num_positions, width))
        self.ln_pre = nn.LayerNorm(width, config.layer_norm_eps)
        self.transformer = _Blocks(config)
        self.attn_pool = _Resampler(config)
        self.ln_post = nn.LayerNorm(config.output_dim, config.layer_norm_eps)
        self.proj = nn.Linear(config.output_dim, config.output_dim, bias=False)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.conv1(pixel_values).flatten(2).transpose(1, 2)
        x = self.transformer(self.ln_pre(x + on_grid(self.positional_embedding, x.shape[1])))
        out: Tensor = self.proj(self.ln_post(self.attn_pool(x)))
        return out
