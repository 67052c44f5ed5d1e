"""The models of the stages, with random weights: a 7B model's shapes on a GPU, small ones on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlora.bench.dummy import model_named, small_config
from vlora.bench.gpu.context import Context
from vlora.bench.timed_engine import TimedEngine
from vlora.models.loading import dummy_model

_LARGE = "qwen2-vl-7b"
ARENA_BYTES, _SMALL_ARENA_BYTES = 12 * 2**30, 2**28


def config_of(context: Context) -> Any:
    """Qwen2-VL-7B on a GPU; a model with 5 million parameters on a CPU."""
    return model_named(_LARGE).config() if context.on_gpu else small_config()


def built(context: Context) -> Any:
    return dummy_model(config_of(context), "bfloat16", context.device, seed=0)


def adapters(counts: Mapping[int, int]) -> dict[str, int]:
    """Ranks by name, "r16-0" to "r16-7" for `counts` {16: 8}."""
    return {f"r{rank}-{index}": rank for rank, count in counts.items() for index in range(count)}


def timed_engine(context: Context, model: Any, counts: Mapping[int, int], /, **given: Any) -> TimedEngine:
    """An engine with this many adapters by rank; further arguments of `TimedEngine`."""
    arena_bytes = ARENA_BYTES if context.on_gpu else _SMALL_ARENA_BYTES
    return TimedEngine(model, adapters(counts), **{"longest": 512, "arena_bytes": arena_bytes, **given})
