"""The named models of benches have the shapes of their names, and memory for the measurements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from vlora.bench.dummy import (
    half_billion_config,
    language_shapes,
    served_config,
    small_config,
    small_served_config,
)
from vlora.bench.scheduling.fit import RANK
from vlora.bench.scheduling.models import MODELS, model_named
from vlora.errors import BadConfig
from vlora.memory.arena import block_pages, pages_for
from vlora.models.families import family_of


@pytest.mark.parametrize(
    ("name", "billions", "tower_millions"),
    [("qwen2-0.5b", 0.592, 98), ("qwen2-vl-7b", 8.29, 676), ("llava-13b", 13.35, 304)],
)
def test_models_have_their_shapes_and_arenas_their_capacity(name: str, billions: float, tower_millions: float) -> None:
    model = model_named(name)
    config = model.config()
    family_of(config)
    with torch.device("meta"):
        built = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    assert sum(each.numel() for each in built.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    tower = built.model.vision_tower if name == "llava-13b" else built.model.visual
    assert sum(each.numel() for each in tower.parameters()) / 1e6 == pytest.approx(tower_millions, rel=0.01)
    shapes = language_shapes(built)
    text = config.text_config
    assert len(shapes) == 7 * text.num_hidden_layers
    adapter = pages_for(sum(2 * RANK * (d_out + d_in) for d_out, d_in in shapes.values()))
    kv_dim = text.num_key_value_heads * text.hidden_size // text.num_attention_heads
    requests = 128 * 3 * block_pages(text.num_hidden_layers, 16, kv_dim, torch.bfloat16)  # at most 45 tokens each
    pages = model.arena_bytes // 2**16
    assert 8 * adapter <= pages // 2 and requests <= pages // 2


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadConfig, match="no model named 'gpt'.*" + ", ".join(MODELS)):
        model_named("gpt")


def num_parameters(config: Any) -> tuple[float, float]:
    """Millions of parameters of the whole model, and of its vision tower."""
    with torch.device("meta"):
        built = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return sum(p.numel() for p in built.parameters()) / 1e6, sum(
        p.numel() for p in built.model.visual.parameters()
    ) / 1e6


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
    assert num_parameters(config) == pytest.approx((whole, tower), rel=0.05)
