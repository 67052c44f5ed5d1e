"""The models of the stages, with random weights: a 7B model's shapes on a GPU, small ones on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vlora.bench.dummy import language_shapes, model_named, small_config
from vlora.bench.gpu.context import Context
from vlora.bench.timed_engine import TimedEngine
from vlora.models.loading import dummy_model

_LARGE = "qwen2-vl-7b"
ARENA_BYTES, _SMALL_ARENA_BYTES = 12 * 2**30, 2**28


class Sizes(NamedTuple):
    """Bytes that a decode step reads."""

    weights: int  # of the language model, with its output head and without its embeddings
    kv_token: int  # KV of one token, all layers
    adapter_rank: int  # one rank of one adapter, all layers


def config_of(context: Context) -> Any:
    """Qwen2-VL-7B on a GPU; a model with 5 million parameters on a CPU."""
    return model_named(_LARGE).config() if context.on_gpu else small_config()


def built(context: Context) -> Any:
    return dummy_model(config_of(context), "bfloat16", context.device, seed=0)


def sizes_of(model: Any) -> Sizes:
    """Of a model that no engine has taken yet."""
    text = model.config.text_config
    language = model.model.language_model
    layers = sum(parameter.numel() for parameter in language.parameters()) - language.embed_tokens.weight.numel()
    width = text.hidden_size // text.num_attention_heads
    return Sizes(
        weights=2 * (layers + model.get_output_embeddings().weight.numel()),
        kv_token=2 * 2 * text.num_hidden_layers * text.num_key_value_heads * width,
        adapter_rank=2 * sum(d_out + d_in for d_out, d_in in language_shapes(model).values()),
    )


def adapters(counts: Mapping[int, int]) -> dict[str, int]:
    """Ranks by name, "r16-0" to "r16-7" for `counts` {16: 8}."""
    return {f"r{rank}-{index}": rank for rank, count in counts.items() for index in range(count)}


def timed_engine(context: Context, model: Any, counts: Mapping[int, int], /, **given: Any) -> TimedEngine:
    """An engine with this many adapters by rank; further arguments of `TimedEngine`."""
    arena_bytes = ARENA_BYTES if context.on_gpu else _SMALL_ARENA_BYTES
    return TimedEngine(model, adapters(counts), **{"longest": 512, "arena_bytes": arena_bytes, **given})
