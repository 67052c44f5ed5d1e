"""A literal implementation of Qwen-VL on a checkpoint's tensors by their published names: the oracle of its tests.

It follows the papers and the published layout, one prompt, one head and one output at a time, in float64, and shares no
code with the model that is served. Lengths above `seq_length` are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.qwen_vl import checkpoint as small


def _affine(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    bias = w.get(f"{name}.bias")
    product = torch.einsum("td,od->to", x, w[f"{name}.weight"])
    return product if bias is None else product + bias


def _layer_norm(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _rms_norm(weight: Tensor, x: Tensor) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight


def _softmax_mix(scores: Tensor, value: Tensor) -> Tensor:
    weights = (scores - scores.amax(1, keepdim=True)).exp()
    return torch.einsum("qk,kd->qd", weights / weights.sum(1, keepdim=True), value)


def _cubic(distance: float) -> float:
    """The kernel of cubic convolution (Keys) with a = -0.75."""
    a, x = -0.75, abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def _resize(rows: Tensor, side: int) -> Tensor:
    """A square grid [n, width], resized to side x side by cubic convolution; pixels are areas, edges are repeated."""
    old = math.isqrt(len(rows))
    weights = torch.zeros(side, old, dtype=rows.dtype)
    for place in range(side):
        centre = (place + 0.5) * old / side - 0.5
        for source in range(math.floor(centre) - 1, math.floor(centre) + 3):
            weights[place, min(max(source, 0), old - 1)] += _cubic(centre - source)
    return torch.einsum("ai,bj,ijd->abd", weights, weights, rows.view(old, old, -1)).reshape(side * side, -1)


def image_rows(w: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """Embeddings [256, hidden] of an image [3, height, width] that is normalized already."""
    at, patch, heads = "transformer.visual.", small.PATCH, small.TOWER_HEADS
    side = pixels.shape[1] // patch
    kernel = w[f"{at}conv1.weight"]
    rows = [
        torch.einsum("chw,ochw->o", pixels[:, patch * y : patch * (y + 1), patch * x : patch * (x + 1)], kernel)
        for y in range(side)
        for x in range(side)
    ]
    x = torch.stack(rows) + _resize(w[f"{at}positional_embedding"], side)
    x = _layer_norm(w, f"{at}ln_pre", x)
    width = small.WIDTH // heads
    for layer in range(small.TOWER_LAYERS):
        block = f"{at}transformer.resblocks.{layer}."
        mixed = _affine(w, f"{block}attn.in_proj", _layer_norm(w, f"{block}ln_1", x))
        found = []
        for head in range(heads):
            # The rows of in_proj are grouped by head, with query, key and value of each.
            q, k, v = (mixed[:, (3 * head + part) * width :][:, :width] for part in range(3))
            found.append(_softmax_mix(q @ k.T / width**0.5, v))
        x = x + _affine(w, f"{block}attn.out_proj", torch.cat(found, 1))
        inner = _affine(w, f"{block}mlp.c_fc", _layer_norm(w, f"{block}ln_2", x))
        inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        x = x + _affine(w, f"{block}mlp.c_proj", inner)
    pool = f"{at}attn_pool."
    value = _layer_norm(w, f"{pool}ln_kv", torch.einsum("td,od->to", x, w[f"{pool}kv_proj.weight"]))
    key = value + _resize(w[f"{pool}pos_embed"], side)
    query = _layer_norm(w, f"{pool}ln_q", w[f"{pool}query"]) + w[f"{pool}pos_embed"]
    size = small.HIDDEN
    stacked, shift = w[f"{pool}attn.in_proj_weight"], w[f"{pool}attn.in_proj_bias"]
    q, k, v = (
        source @ stacked[part * size : (part + 1) * size].T + shift[part * size : (part + 1) * size]
        for part, source in enumerate((query, key, value))
    )
    found = []
    for start in range(0, size, 128):  # heads of the resampler have 128 values in every checkpoint
        one = slice(start, start + 128)
        found.append(_softmax_mix(q[:, one] @ k[:, one].T / 128**0.5, v[:, one]))
    pooled = _affine(w, f"{pool}attn.out_proj", torch.cat(found, 1))
    return torch.einsum("td,do->to", _layer_norm(w, f"{at}ln_post", pooled), w[f"{at}proj"])


def _rotation(length: int, width: int) -> Tensor:
    """Rotary embedding of one head as a matrix per token [length, width, width]: i pairs with i + width / 2."""
    half = width // 2
    turns = [[[0.0] * width for _ in range(width)] for _ in range(length)]
    for place, turn in enumerate(turns):
        for i in range(half):
            angle = place * 10000.0 ** (-2 * i / width)
            turn[i][i] = turn[i + half][i + half] = math.cos(angle)
            turn[i][i + half], turn[i + half][i] = -math.sin(angle), math.sin(angle)
    return torch.tensor(turns, dtype=torch.float64)


def hidden_states(
    weights: Mapping[str, Tensor], ids: Sequence[int], images: Sequence[Tensor], rotation: Tensor | None = None
) -> Tensor:
    """Hidden states [tokens, hidden] of a prompt after the final norm.

    Args:
        weights: By published name, with the deltas of an adapter if there is one.
        ids: Tokens; each image has 256 placeholders.
        images: Normalized pixels [3, height, width] of each image.
        rotation: `_rotation` for at least this many tokens.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["transformer.wte.weight"][torch.tensor(ids)]
    places = [place for place, token in enumerate(ids) if token == small.IMAGE_PAD]
    for number, image in enumerate(images):
        own = places[number * small.NUM_QUERIES : (number + 1) * small.NUM_QUERIES]
        x[own] = image_rows(w, image.double())
    width = small.HIDDEN // small.HEADS
    turn = (_rotation(len(ids), width) if rotation is None else rotation)[: len(ids)]
    future = torch.full((len(ids), len(ids)), -math.inf, dtype=torch.float64).triu(1)
    for layer in range(small.LAYERS):
        at = f"transformer.h.{layer}."
        fused = _affine(w, f"{at}attn.c_attn", _rms_norm(w[f"{at}ln_1.weight"], x))
        found = []
        for head in range(small.HEADS):
            q, k, v = (fused[:, part * small.HIDDEN + head * width :][:, :width] for part in range(3))
            q, k = (torch.einsum("tij,tj->ti", turn, side) for side in (q, k))
            found.append(_softmax_mix(q @ k.T / width**0.5 + future, v))
        x = x + _affine(w, f"{at}attn.c_proj", torch.cat(found, 1))
        inner = _rms_norm(w[f"{at}ln_2.weight"], x)
        gate = _affine(w, f"{at}mlp.w2", inner)
        x = x + _affine(w, f"{at}mlp.c_proj", _affine(w, f"{at}mlp.w1", inner) * gate / (1 + (-gate).exp()))
    return _rms_norm(w["transformer.ln_f.weight"], x)


def logits(
    weights: Mapping[str, Tensor], ids: Sequence[int], images: Sequence[Tensor], rotation: Tensor | None = None
) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt. The arguments are those of `hidden_states`."""
    return hidden_states(weights, ids, images, rotation) @ weights["lm_head.weight"].double().T


def generate(
    weights: Mapping[str, Tensor], ids: Sequence[int], images: Sequence[Tensor], num_tokens: int
) -> tuple[list[int], Tensor]:
    """Greedy tokens, and the logits from which each was chosen, [num_tokens, vocabulary]."""
    rotation = _rotation(len(ids) + num_tokens, small.HIDDEN // small.HEADS)
    answer: list[int] = []
    rows: list[Tensor] = []
    for _ in range(num_tokens):
        rows.append(logits(weights, [*ids, *answer], images, rotation)[-1])
        answer.append(int(rows[-1].argmax()))
    return answer, torch.stack(rows).float()
