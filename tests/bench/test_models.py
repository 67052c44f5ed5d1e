"""The models that benches know by name have the shapes they are named after, and room for what is measured."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from vlora.bench.dummy import language_shapes
from vlora.bench.fit import RANK
from vlora.bench.models import MODELS, model_named
from vlora.errors import BadConfig
from vlora.memory.arena import block_pages, pages_for
from vlora.models.families import family_of


@pytest.mark.parametrize(("name", "billions"), [("qwen2-0.5b", 0.494), ("qwen2-vl-7b", 8.29), ("llava-13b", 13.35)])
def test_shapes_and_room(name: str, billions: float) -> None:
    model = model_named(name)
    config = model.config()
    family_of(config)
    with torch.device("meta"):
        built = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    assert sum(each.numel() for each in built.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    shapes = language_shapes(built)
    text = config.text_config
    assert len(shapes) == 7 * text.num_hidden_layers
    adapter = pages_for(sum(2 * RANK * (d_out + d_in) for d_out, d_in in shapes.values()))
    kv_dim = text.num_key_value_heads * text.hidden_size // text.num_attention_heads
    requests = 128 * 3 * block_pages(text.num_hidden_layers, 16, kv_dim, torch.bfloat16)  # at most 45 tokens each
    pages = model.arena_bytes // 2**16
    assert 8 * adapter <= pages // 2 and requests <= pages // 2


def test_unknown_names_are_told_with_the_known_ones() -> None:
    with pytest.raises(BadConfig, match="no model named 'gpt'.*" + ", ".join(MODELS)):
        model_named("gpt")
