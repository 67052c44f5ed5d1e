"""Prompts of 2,048 tokens in every mode, and images through the vision tower of a 7B model."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from vlora.bench.dummy import dummy_picture
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context, elapsed, host_seconds, repeats
from vlora.bench.report import Goal
from vlora.bench.timed_engine import FixedModePolicy, Kind, TimedEngine
from vlora.models.vision.encoder import VisionTask
from vlora.types import VisionInput

TOKENS, _SMALL_TOKENS = 2048, 64
SIDE, OTHER_SIDES = 32, (30, 34, 46)  # patches per side: 1,024 patches, and sizes that are new to the engine
_SMALL_SIDE, _SMALL_OTHER_SIDES = 4, (6,)
_NUM_IMAGES = (1, 4, 16)
_MODES = (
    Kind("merged", ("r16-0",), True),
    Kind("unmerged", ("r16-0",), False),
    Kind("mixed", ("r16-0", "r16-1"), True),
)


def run(context: Context) -> dict[str, Any]:
    model = models.built(context)
    tokens = TOKENS if context.on_gpu else _SMALL_TOKENS
    policy = FixedModePolicy()
    parts = {"policy": policy}
    engine = models.timed_engine(context, model, {16: 2}, parts=parts, max_batch_size=4, max_step_tokens=4096)
    prompts = _prompts(context, engine, policy, tokens, model.config.text_config)
    context.keep({"prompts": prompts})
    images = _images(context, engine, model.config)
    goals = goals_of(prompts, images, context.gpu) if context.on_gpu else []
    one = images[0]
    return {
        "summary": f"{tokens} tokens merged {prompts[0]['ms']:.1f} ms; {one['patches']} patches {one['ms']:.1f} ms",
        "prompts": prompts,
        "images": images,
        "goals": goals,
    }


def _prompts(
    context: Context, engine: TimedEngine, policy: FixedModePolicy, tokens: int, text_config: Any
) -> list[dict[str, Any]]:
    rows = []
    for name, adapters, merging in _MODES:
        policy.merging = merging
        seconds = host_seconds(context, functools.partial(engine.prefill, adapters, tokens), warmup=3)
        took = statistics.median(seconds)
        rows.append(
            {
                "mode": name,
                "tokens": tokens,
                "requests": len(adapters),
                "ms": 1e3 * took,
                "slowest ms": 1e3 * max(seconds),
                "TFLOP/s": len(adapters) * prefill_flops(text_config, tokens // len(adapters)) / took / 1e12,
            }
        )
    return rows


def _images(context: Context, engine: TimedEngine, config: Any) -> list[dict[str, Any]]:
    """Calls of the tower. The first call of each size counts separately: a server sees new sizes all the time."""
    side, others = (SIDE, OTHER_SIDES) if context.on_gpu else (_SMALL_SIDE, _SMALL_OTHER_SIDES)
    pictures = _pictures(config, side)
    rows = []
    for count in _NUM_IMAGES:
        calls = [[next(pictures) for _ in range(count)] for _ in range(1 + repeats(context))]
        first, *seconds = [_encode(context, engine, call) for call in calls]
        rows.append(
            {
                "images": count,
                "patches": count * calls[0][0].num_patches,
                "ms": 1e3 * statistics.median(seconds),
                "first ms": 1e3 * first,
            }
        )
    for other in others:
        found = _pictures(config, other)
        picture = next(found)
        first = _encode(context, engine, [picture])
        again = _encode(context, engine, [next(found)])
        rows.append({"images": 1, "patches": picture.num_patches, "ms": 1e3 * again, "first ms": 1e3 * first})
    return rows


def _pictures(config: Any, side: int) -> Iterator[VisionInput]:
    """Images of one size that no cache has seen."""
    picture = dummy_picture(config, side)
    for number in itertools.count():
        yield msgspec.structs.replace(picture, content_hash=f"{side} {number}")


def _encode(context: Context, engine: TimedEngine, pictures: list[VisionInput]) -> float:
    """Seconds of one call of the tower."""
    encoder = engine.engine.parts.device.vision
    with torch.inference_mode():
        return elapsed(lambda: encoder.encode([VisionTask(picture, None) for picture in pictures]), context)


_MOST_MS = {"H100": (45.0, 12.0, 30.0), "H200": (45.0, 8.0, 30.0)}
"""By GPU: of the tokens, of an image, and of the first image of a new size."""


def goals_of(prompts: list[dict[str, Any]], images: list[dict[str, Any]], gpu: str) -> list[Goal]:
    ms = {row["mode"]: row["ms"] for row in prompts}
    goals = [Goal("prefill, unmerged / merged", ms["unmerged"] / ms["merged"], 1.10, True)]
    if gpu in _MOST_MS:
        prompt, image, new_size = _MOST_MS[gpu]
        slowest = max(row["first ms"] for row in images[len(_NUM_IMAGES) :])
        goals += [
            Goal(f"prefill of {TOKENS} tokens, merged, ms", ms["merged"], prompt, True),
            Goal("one image of 1,024 patches, ms", images[0]["ms"], image, True),
            Goal("the first image of a new size, slowest, ms", slowest, new_size, True),
        ]
    return goals


def prefill_flops(text_config: Any, num_tokens: int) -> int:
    """Floating-point operations of one prompt, up to the output of its last token, in any number of chunks.

    The last layer computes keys and values of all tokens, and the rest for the last token only.
    """
    hidden, inner = text_config.hidden_size, text_config.intermediate_size
    heads, layers = text_config.num_attention_heads, text_config.num_hidden_layers
    kv_width = text_config.num_key_value_heads * (hidden // heads)
    keys_and_values = 2 * hidden * kv_width
    others = 2 * hidden * hidden + 3 * hidden * inner
    context = num_tokens * (num_tokens + 1) // 2  # attended tokens, over all queries
    products = (layers * keys_and_values + (layers - 1) * others) * num_tokens + others
    attention = 2 * hidden * ((layers - 1) * context + num_tokens)
    return 2 * (products + attention + hidden * text_config.vocab_size)
