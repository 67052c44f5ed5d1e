"""Tiny models with random weights of every supported family, and prompts for them, for the oracle tests."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

from vlora.models.families import placeholder_count
from vlora.models.processing import vision_input
from vlora.models.qwen_vl.config import QwenVLConfig, QwenVLVisionConfig
from vlora.models.qwen_vl.model import QwenVLForConditionalGeneration
from vlora.types import VisionInput

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB = 64, 4, 4, 2, 16, 128, 200
IMAGE, VIDEO, VISION_START, VISION_END = 190, 191, 192, 193
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen_vl", "llava", "llava_next", "llava_onevision")
MROPE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision")
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


_TOWER: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
_CLIP = CLIPVisionConfig(intermediate_size=64, num_hidden_layers=3, projection_dim=32, **_TOWER)
_SIGLIP = SiglipVisionConfig(intermediate_size=64, num_hidden_layers=3, vision_use_head=False, **_TOWER)
_QWEN = {"depth": 3, "hidden_size": 32, "out_hidden_size": HIDDEN, "num_heads": 2, "patch_size": 4}
_MROPE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig,
        {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {**_QWEN, "intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        {**_QWEN, "intermediate_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]},
    ),
}
"""The model, its configuration, and the fields of its vision tower."""
_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}


def build_model(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    tower: str = "clip",
    text_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A model of the family with weights large enough that every part affects the logits.

    Args:
        family: One of `FAMILIES`.
        dtype: Type of the weights.
        seed: Seed of the weights.
        tower: LLaVA's vision tower: clip or siglip.
        text_settings: Changes of the text model's configuration.
        settings: Further fields of LLaVA's configuration.
    """
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **(text_settings or {}),
    }
    torch.manual_seed(seed)
    if family in _MROPE:
        of, configured, vision = _MROPE[family]
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        if family == "qwen3_vl":
            text["head_dim"] = HEAD_DIM
            rope["mrope_interleaved"] = True
        model: Any = of(
            configured(text_config={**text, "rope_parameters": rope}, vision_config=dict(vision), **_TOKENS)
        )
    elif family == "qwen_vl":
        queries: dict[str, Any] = {"num_positions": 9, "num_queries": 9, "num_pool_heads": 4, "output_dim": HIDDEN}
        pooled = QwenVLVisionConfig(intermediate_size=64, num_hidden_layers=2, **_TOWER, **queries)
        every_head = Qwen2Config(**{**text, "num_key_value_heads": HEADS})
        model = QwenVLForConditionalGeneration(
            QwenVLConfig(text_config=every_head, vision_config=pooled, image_token_id=IMAGE)
        )
    elif family == "llava":
        chosen = copy.deepcopy({"clip": _CLIP, "siglip": _SIGLIP}[tower])
        shown = {"image_token_index": IMAGE, "image_seq_length": 16, **settings}
        model = LlavaForConditionalGeneration(
            LlavaConfig(text_config=LlamaConfig(**text), vision_config=chosen, **shown)
        )
    elif family == "llava_next":
        shown = {"image_token_index": IMAGE, "image_seq_length": 16, "image_grid_pinpoints": _PINPOINTS}
        model = LlavaNextForConditionalGeneration(
            LlavaNextConfig(text_config=LlamaConfig(**text), vision_config=copy.deepcopy(_CLIP), **shown)
        )
    else:
        assert family == "llava_onevision", family
        shown = {"image_token_index": IMAGE, "video_token_index": VIDEO, "image_grid_pinpoints": _PINPOINTS}
        model = LlavaOnevisionForConditionalGeneration(
            LlavaOnevisionConfig(text_config=Qwen2Config(**text), vision_config=copy.deepcopy(_SIGLIP), **shown)
        )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                in_rows = any(part in name for part in ("embed_tokens", "query", "pos_embed"))
                scale = 0.5 if in_rows else 0.6 / parameter[0].numel() ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


LANGUAGE_LINEARS = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"


def vision_linears(family: str) -> str:
    """PEFT target pattern for every linear layer of the vision tower and the projector."""
    if family == "qwen_vl":
        return (
            r".*visual\.(transformer\.resblocks\.\d+\.(attn\.(in_proj|out_proj)|mlp\.(c_fc|c_proj))"
            r"|attn_pool\.(kv_proj|attn\.(q|k|v|out)_proj)|proj)"
        )
    if family in MROPE_FAMILIES:
        return (
            r".*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(fc1|fc2|gate_proj|up_proj|down_proj|linear_fc1|linear_fc2))"
            r"|merger\.(mlp\.[02]|linear_fc\d)|deepstack_merger_list\.\d+\.linear_fc\d)"
        )
    return r".*(vision_tower\..*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)|multi_modal_projector\.linear_[12])"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt in two forms: keyword arguments of transformers' `generate`, and the engine's input."""

    kwargs: dict[str, torch.Tensor]
    prompt_ids: tuple[int, ...]
    vision: tuple[VisionInput, ...]


def make_prompt(
    family: str,
    model: Any,
    seed: int,
    *,
    num_images: int = 0,
    num_videos: int = 0,
    frames: int | None = None,
    text: tuple[int, int] = (5, 6),
) -> Prompt:
    """Random text around `num_images` images, then `num_videos` videos, of sizes that depend on the seed.

    frames: The frames of each video. Default: two or three.
    """
    generator = torch.Generator().manual_seed(1000 + seed)

    def words(count: int) -> list[int]:
        return torch.randint(3, 180, (count,), generator=generator).tolist()

    ids = words(text[0])
    vision: list[VisionInput] = []
    fields: list[tuple[str, dict[str, torch.Tensor]]] = []
    for index in range(num_images):
        made = _image_fields(family, model, generator, seed + index, num_images)
        item = vision_input("image", made, placeholder_count(model.config, made))
        ids += _around(family, [IMAGE] * item.num_tokens) + words(2)
        vision.append(item)
        fields.append(("image", made))
    for index in range(num_videos):
        made, tokens = _video_fields(family, model, generator, frames or 2 + (seed + index) % 2)
        vision.append(vision_input("video", made, tokens.count(VIDEO)))
        ids += tokens + words(2)
        fields.append(("video", made))
    ids += words(text[1])
    kwargs: dict[str, torch.Tensor] = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
    }
    names = {name for _, made in fields for name in made}
    for name in names:
        parts = [made[name] for _, made in fields if name in made]
        if parts[0].ndim == 5 and name == "pixel_values":
            most = max(part.shape[1] for part in parts)
            parts = [torch.cat([p, p.new_zeros(1, most - p.shape[1], *p.shape[2:])], 1) for p in parts]
        kwargs[name] = parts[0] if name == "batch_num_images" else torch.cat(parts)
    if family in MROPE_FAMILIES:
        types = torch.zeros(1, len(ids), dtype=torch.int)
        types[kwargs["input_ids"] == IMAGE] = 1
        types[kwargs["input_ids"] == VIDEO] = 2
        kwargs["mm_token_type_ids"] = types
    return Prompt(kwargs, tuple(ids), tuple(vision))


def _around(family: str, tokens: list[int]) -> list[int]:
    return [VISION_START, *tokens, VISION_END] if family in MROPE_FAMILIES else tokens


def _image_fields(
    family: str, model: Any, generator: torch.Generator, seed: int, num_images: int
) -> dict[str, torch.Tensor]:
    if family in MROPE_FAMILIES:
        height, width = [(4, 6), (6, 8), (8, 4), (4, 4)][seed % 4]
        pixels = torch.randn(height * width, 3 * 2 * model.config.vision_config.patch_size**2, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
    if family in ("llava", "qwen_vl"):
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    size = [(24, 30), (30, 20), (20, 20), (16, 30)][seed % 4]
    tiles = 1
    if family == "llava_next" or num_images == 1:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        tiles = image_size_to_num_patches(list(size), model.config.image_grid_pinpoints, 16)
    made = {
        "pixel_values": torch.randn(1, tiles, 3, 16, 16, generator=generator),
        "image_sizes": torch.tensor([list(size)]),
    }
    if family == "llava_onevision":
        made["batch_num_images"] = torch.tensor([num_images])
    return made


def _video_fields(
    family: str, model: Any, generator: torch.Generator, frames: int
) -> tuple[dict[str, torch.Tensor], list[int]]:
    if family == "llava_onevision":
        # 4x4 patches are pooled to 2x2 per frame, and one newline embedding ends the clip.
        pixels = torch.randn(1, frames, 3, 16, 16, generator=generator)
        return {"pixel_values_videos": pixels}, [VIDEO] * (frames * 4 + 1)
    height, width = 4, 6
    made = {
        "pixel_values_videos": torch.randn(
            frames * height * width, 3 * 2 * model.config.vision_config.patch_size**2, generator=generator
        ),
        "video_grid_thw": torch.tensor([[frames, height, width]]),
    }
    if family == "qwen2_5_vl":
        made["second_per_grid_ts"] = torch.tensor([1.0])
    if family == "qwen3_vl":
        # Each time step is separate and follows a timestamp in text.
        per_frame = [7, 8, VISION_START, *[VIDEO] * (height * width // 4), VISION_END]
        return made, per_frame * frames
    return made, [VISION_START, *[VIDEO] * (frames * height * width // 4), VISION_END]
