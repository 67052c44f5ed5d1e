"""The models for the comparison of policies: random weights of real shapes, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2VLConfig

from vlora.bench.dummy import half_billion_config
from vlora.errors import BadConfig


class BenchModel(NamedTuple):
    """A model to measure.

    Attributes:
        name: Its name on the command line.
        config: Creates its config.
        arena_bytes: One half holds eight adapters of rank 64, the other half the KV of 128 short requests.
        all_policies: Whether a machine has memory for an engine of every policy at once.
    """

    name: str
    config: Callable[[], Any]
    arena_bytes: int
    all_policies: bool = False


def _qwen2_vl_7b() -> Qwen2VLConfig:
    return Qwen2VLConfig(
        text_config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14},
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        image_token_id=151655,
        video_token_id=151656,
    )


def _llava_13b() -> LlavaConfig:
    """LLaVA-1.5."""
    text = LlamaConfig(
        vocab_size=32064,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        max_position_embeddings=4096,
    )
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    return LlavaConfig(vision_config=vision, text_config=text, image_token_index=32000)


MODELS = {
    model.name: model
    for model in (
        BenchModel("qwen2-0.5b", half_billion_config, 2 * 2**30, all_policies=True),
        BenchModel("qwen2-vl-7b", _qwen2_vl_7b, 8 * 2**30),
        BenchModel("llava-13b", _llava_13b, 12 * 2**30),
    )
}


def model_named(name: str) -> BenchModel:
    """The model with this name.

    Raises:
        BadConfig: There is none; the message lists the known names.
    """
    if name not in MODELS:
        raise BadConfig(f"no model named {name!r} to measure; choose one of {', '.join(MODELS)}")
    return MODELS[name]
