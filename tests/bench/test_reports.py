"""Parts that all benches share: rounds of calls, model shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from vlora.bench.costs import RANK
from vlora.bench.dummy import (
    MODELS,
    half_billion_config,
    language_shapes,
    model_named,
    served_config,
    small_config,
    small_served_config,
)
from vlora.bench.timing import interleaved
from vlora.errors import BadConfig
from vlora.memory.arena import block_pages, pages_for
from vlora.models.families import family_of


@pytest.mark.parametrize(("limit_s", "rounds"), [(math.inf, 4), (100.0, 4), (6.0, 2), (2.0, 1), (0.0, 1)])
def test_no_round_begins_after_the_limit_but_one_counts(limit_s: float, rounds: int) -> None:
    now, calls = [0.0], []

    def call(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    candidates = {"a": lambda: call("a", 1.0), "b": lambda: call("b", 2.0)}
    found = interleaved(candidates, 4, warmup=1, clock=lambda: now[0], limit_s=limit_s)
    assert found == {"a": [1.0] * rounds, "b": [2.0] * rounds}
    assert calls == ["a", "b"] * (1 + rounds)
    now[0] = 0.0  # a long warm-up is cut short
    assert interleaved({"a": lambda: call("a", 5.0)}, 9, warmup=3, clock=lambda: now[0], limit_s=4.0) == {"a": [5.0]}
    assert now[0] == 10.0


def built(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


def millions(module: Any) -> float:
    return sum(parameter.numel() for parameter in module.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "whole", "tower"), [("qwen2-0.5b", 592, 98), ("qwen2-vl-7b", 8290, 676), ("llava-13b", 13350, 304)]
)
def test_models_have_their_shapes_and_arenas_their_capacity(name: str, whole: float, tower: float) -> None:
    model = model_named(name)
    config = model.config()
    family_of(config)
    made = built(config)
    own_tower = made.model.vision_tower if name == "llava-13b" else made.model.visual
    assert (millions(made), millions(own_tower)) == pytest.approx((whole, tower), rel=0.01)
    shapes, text = language_shapes(made), config.text_config
    assert len(shapes) == 7 * text.num_hidden_layers
    adapter = pages_for(sum(2 * RANK * (d_out + d_in) for d_out, d_in in shapes.values()))
    kv_dim = text.num_key_value_heads * text.hidden_size // text.num_attention_heads
    requests = 128 * 3 * block_pages(text.num_hidden_layers, 16, kv_dim, torch.bfloat16)  # at most 45 tokens each
    pages = model.arena_bytes // 2**16
    assert 8 * adapter <= pages // 2 and requests <= pages // 2
    with pytest.raises(BadConfig, match="no model named 'gpt'.*" + ", ".join(MODELS)):
        model_named("gpt")


@pytest.mark.parametrize(
    ("config", "whole", "tower"),
    [
        (half_billion_config(), 592, 98),
        (half_billion_config(vision="none"), 494, 0.4),
        (half_billion_config(8), 297, 41.4),
        (small_config(), 6.0, 0.94),
        (small_config("none"), 5.2, 0.25),
        (served_config(), 515, 98),
        (small_served_config(), 10.9, 0.94),
    ],
)
def test_towers_have_their_family_shape_or_negligible_cost(config: Any, whole: float, tower: float) -> None:
    made = built(config)
    assert (millions(made), millions(made.model.visual)) == pytest.approx((whole, tower), rel=0.05)
