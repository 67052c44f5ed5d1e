"""The models of the stages, with random weights: a 7B model's shapes on a GPU, small ones on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vlora.bench.dummy import language_shapes, model_named, small_config, write_adapter
from vlora.bench.gpu.context import Context
from vlora.bench.timed_engine import FixedModePolicy, TimedEngine
from vlora.config import EngineConfig, Quantize
from vlora.models.loading import dummy_model

DTYPE = "bfloat16"
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
    """The model on the device."""
    return dummy_model(config_of(context), DTYPE, context.device, seed=0)


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


@contextmanager
def adapter_folders(model: Any, counts: Mapping[int, int]) -> Iterator[dict[str, str]]:
    """Folders by name, "r16-0" to "r16-7" for `counts` {16: 8}, on all linear layers of the language model.

    One folder per rank: an engine loads it once for each name.
    """
    shapes = language_shapes(model)
    dtype = next(model.parameters()).dtype
    with tempfile.TemporaryDirectory() as root:
        folders = {
            rank: write_adapter(Path(root) / f"r{rank}", shapes, rank, seed=rank, dtype=dtype) for rank in counts
        }
        yield {f"r{rank}-{index}": folders[rank] for rank, count in counts.items() for index in range(count)}


def timed_engine(
    context: Context,
    model: Any,
    adapters: Mapping[str, str],
    policy: FixedModePolicy,
    *,
    prompt: int,
    batch: int,
    quantize: Quantize = "none",
) -> TimedEngine:
    """An engine for requests with prompts of `prompt` tokens, at most `batch` at a time."""
    config = EngineConfig(
        model="dummy",
        device=str(context.device),
        dtype=DTYPE,
        quantize=quantize,
        max_batch_size=batch,
        max_step_tokens=4096,
        arena_bytes=ARENA_BYTES if context.on_gpu else _SMALL_ARENA_BYTES,
        merge_fidelity_floor=0.0,
        prefix_cache=False,  # each request reads its own KV
        vision_cache_bytes=0,
    )
    return TimedEngine(config, model, adapters, context=prompt, longest=512, policy=policy)
