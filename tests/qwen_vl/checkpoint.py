"""Small checkpoints of Qwen-VL in the layout of the published ones, with random weights."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, LAYERS, INTER = 256, 4, 2, 96
WIDTH, TOWER_HEADS, TOWER_LAYERS, TOWER_INTER = 64, 2, 2, 160
PATCH, IMAGE_SIZE = 14, 56
NUM_QUERIES = NUM_POSITIONS = 256

# Tokens of the vocabulary beside the 256 bytes, in the order of their merges.
MERGED = (
    b"th", b"in", b" t", b"he", b"the", b" the", b"ha", b"at", b"Wh", b"What", b" s", b"is", b" is",
    b"ic", b"tu", b"re", b"Pi", b"Pic", b"ture", b"ow", b"ll", b"oo", b"  ", b"\n\n", b"an", b"aa", b"aaa", b"La",
)  # fmt: skip
NUM_RANKS = 256 + len(MERGED)
END_OF_TEXT = NUM_RANKS
IMAGE_START = END_OF_TEXT + 214
IMAGE_END, IMAGE_PAD = IMAGE_START + 1, IMAGE_START + 2
VOCAB = IMAGE_PAD + 5  # the published vocabulary is padded too


def published_config(**changes: Any) -> dict[str, Any]:
    """A config.json with the fields of Qwen/Qwen-VL's and small sizes."""
    return {**json.loads((Path(__file__).parent / "config.json").read_text()), **changes}


def _linear(name: str, d_in: int, d_out: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (d_out, d_in), **({f"{name}.bias": (d_out,)} if bias else {})}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape, in the published names."""
    vocab, hidden, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"] // 2
    own, visual = config["visual"], "transformer.visual"
    width, patch, tower_inner = own["width"], own["patch_size"], int(own["width"] * own["mlp_ratio"])
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    shapes["transformer.ln_f.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer.h.{layer}"
        shapes |= {f"{at}.ln_1.weight": (hidden,), f"{at}.ln_2.weight": (hidden,)}
        shapes |= _linear(f"{at}.attn.c_attn", hidden, 3 * hidden)
        shapes |= _linear(f"{at}.attn.c_proj", hidden, hidden, bias=False)
        shapes |= _linear(f"{at}.mlp.w1", hidden, inner, bias=False)
        shapes |= _linear(f"{at}.mlp.w2", hidden, inner, bias=False)
        shapes |= _linear(f"{at}.mlp.c_proj", inner, hidden, bias=False)
    shapes[f"{visual}.conv1.weight"] = (width, 3, patch, patch)
    shapes[f"{visual}.positional_embedding"] = (NUM_POSITIONS, width)
    shapes |= _norm(f"{visual}.ln_pre", width)
    for layer in range(own["layers"]):
        at = f"{visual}.transformer.resblocks.{layer}"
        shapes |= _norm(f"{at}.ln_1", width)
        shapes |= _linear(f"{at}.attn.in_proj", width, 3 * width) | _linear(f"{at}.attn.out_proj", width, width)
        shapes |= _norm(f"{at}.ln_2", width)
        shapes |= _linear(f"{at}.mlp.c_fc", width, tower_inner) | _linear(f"{at}.mlp.c_proj", tower_inner, width)
    pool = f"{visual}.attn_pool"
    shapes |= {f"{pool}.query": (NUM_QUERIES, hidden), f"{pool}.pos_embed": (NUM_QUERIES, hidden)}
    shapes |= _linear(f"{pool}.kv_proj", width, hidden, bias=False)
    shapes |= {f"{pool}.attn.in_proj_weight": (3 * hidden, hidden), f"{pool}.attn.in_proj_bias": (3 * hidden,)}
    shapes |= _linear(f"{pool}.attn.out_proj", hidden, hidden)
    shapes |= _norm(f"{pool}.ln_q", hidden) | _norm(f"{pool}.ln_kv", hidden) | _norm(f"{visual}.ln_post", hidden)
    shapes[f"{visual}.proj"] = (hidden, hidden)
    return shapes


def random_weights(seed: int = 0, config: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Weights large enough that every part affects the logits. config: by default `published_config()`."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in _shapes(config or published_config()).items():
        value = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            in_rows = name.endswith(("wte.weight", "embedding", "query", "pos_embed"))
            value *= 0.5 if in_rows else 0.8 / (value[0].numel() ** 0.5)
        else:
            value = value * 0.2 + (0.0 if name.endswith("bias") else 1.0)
        weights[name] = value
    return weights


def write_vocabulary(folder: Path) -> None:
    ranks = [bytes([byte]) for byte in range(256)] + list(MERGED)
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks))
    (folder / "qwen.tiktoken").write_text("\n".join(lines) + "\n")


def write_checkpoint(
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    shards: int = 1,
    pickled: bool = False,
    chat: bool = True,
    **changes: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint with everything but the published code.

    Args:
        folder: Where, created if necessary.
        weights: By default `random_weights`.
        shards: Number of files with weights.
        pickled: Whether they are pytorch_model*.bin files, as the published ones.
        chat: Whether it is Qwen-VL-Chat.
        changes: Fields of config.json that differ from `published_config`.

    Returns:
        The weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = dict(random_weights() if weights is None else weights)
    (folder / "config.json").write_text(json.dumps(published_config(**changes)))
    generation = {"chat_format": "chatml" if chat else "raw", "eos_token_id": END_OF_TEXT, "pad_token_id": END_OF_TEXT}
    sampling = {"do_sample": True, "max_new_tokens": 512, "max_window_size": 6144, "top_k": 0, "top_p": 0.3}
    (folder / "generation_config.json").write_text(json.dumps({**generation, **sampling}))
    auto = {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}
    classes = {"tokenizer_class": "QWenTokenizer", "auto_map": auto}
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8192, **classes}))
    write_vocabulary(folder)
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    several = [f"{stem}-{i + 1:05}-of-{shards:05}.{ending}" for i in range(shards)]
    names = several if shards > 1 else [f"{stem}.{ending}"]
    placed = {name: names[i % shards] for i, name in enumerate(held)}
    for file in names:
        part = {name: held[name].contiguous() for name in held if placed[name] == file}
        if pickled:
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        size = sum(tensor.nbytes for tensor in held.values())
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return held
