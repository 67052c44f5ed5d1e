"""Attention of vision towers on a GPU: all images of a call in one launch of torch's flash kernel per layer.

Qwen towers pack the patches of all images. With an attention named after flash, transformers passes the packed patches
with their boundaries; with any other it copies the boundaries to the host in every layer and calls once per image.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

import atmm
from vlora.models.vision.stepwise_tower import VISION_ATTENTION, paced_attention, spend

# Must contain "flash": transformers then passes the boundaries of packed sequences.
VISION_FLASH = "vlora_vision_flash"


def register_vision_attention(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    name = VISION_FLASH if on_gpu else VISION_ATTENTION
    AttentionInterface.register(name, flash_attention if on_gpu else paced_attention)
    return name


def flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Full attention with transformers' interface, within each sequence.

    Sequences of different lengths count for `spend` as if all had the longest length: their lengths are on the device.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: Like `query`, with tokens of its own if no sequences are packed.
        attention_mask: None; with a mask, the plain attention is used.
        scaling: Factor of the scores; default: head_dim ** -0.5.
        cu_seq_lens_q: int32 [sequences + 1], the boundaries of packed sequences, for a batch of 1; None if each element
            of the batch is a sequence.
        max_length_q: The longest packed sequence.

    Returns:
        [batch, tokens, heads, head_dim].
    """
    batch, heads, num_tokens, width = query.shape
    num_keys = key.shape[2]
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    plain = attention_mask is not None or causal or key.shape[1] != heads
    if plain or not atmm.serves_flash(query.device, query.dtype, width):
        rest = {name: value for name, value in kwargs.items() if name not in ("cu_seq_lens_k", "max_length_k")}
        if cu_seq_lens_q is None:
            return paced_attention(module, query, key, value, attention_mask, scaling=scaling, **rest)
        counts = cu_seq_lens_q.diff().tolist()
        parts = zip(query.split(counts, 2), key.split(counts, 2), value.split(counts, 2), strict=True)
        done = [paced_attention(module, q, k, v, None, scaling=scaling, **rest)[0] for q, k, v in parts]
        return torch.cat(done, 1), None
    q, k, v = (side.transpose(1, 2).reshape(-1, heads, width) for side in (query, key, value))
    bounds, key_bounds, longest, longest_key = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    if bounds is None or key_bounds is None:
        bounds, key_bounds = (
            torch.arange(0, (batch + 1) * count, count, dtype=torch.int32, device=query.device)
            for count in (num_tokens, num_keys)
        )
        longest, longest_key = num_tokens, num_keys
    assert longest is not None and longest_key is not None
    out = atmm.flash(
        q,
        k,
        v,
        bounds,
        key_bounds,
        longest,
        longest_key,
        causal=False,
        scale=width**-0.5 if scaling is None else scaling,
    )
    spend(4.0 * batch * num_tokens * longest_key * heads * width)
    return out.view(batch, num_tokens, heads, width), None
