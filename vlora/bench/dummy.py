"""Models and adapters of real shapes with random weights: speed does not depend on the values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2VLConfig

_IMAGE, _VIDEO, _VISION_START, _VISION_END = 151655, 151656, 151652, 151653


def half_billion_config(num_layers: int = 24) -> Qwen2VLConfig:
    """Qwen2-VL with the language model of Qwen2-0.5B, or its first layers, and a vision tower that takes next to no
    time."""
    return Qwen2VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 1,
            "embed_dim": 64,
            "hidden_size": 896,
            "num_heads": 2,
            "patch_size": 14,
            "mlp_ratio": 2,
        },
        image_token_id=_IMAGE,
        video_token_id=_VIDEO,
        vision_start_token_id=_VISION_START,
        vision_end_token_id=_VISION_END,
        tie_word_embeddings=True,
    )


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> str:
    """A random LoRA of one rank on the layers of `shapes` (name -> out, in), in PEFT's format; returns the folder."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (d_out, d_in) in shapes.items():
        # Deltas of about a tenth of a freshly initialised weight (0.02): what training makes of LoRA.
        scale = (0.002 / rank**0.5) ** 0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, d_in, generator=generator) * scale
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(d_out, rank, generator=generator) * scale
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def language_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Every linear layer of the language model: name -> (out, in)."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.language_model.")
    }
