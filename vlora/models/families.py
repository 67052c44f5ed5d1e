"""The supported model families and their differences. Any other model is rejected with the reason."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import torch

from vlora.models.supported import CLASS_TOKENS, refuse_unsupported_parts, unsupported_family
from vlora.types import VisionInput


@dataclasses.dataclass(frozen=True)
class Family:
    """Properties of one model type.

    mrope: positions have three rows (time, height, width). tiles: an image is divided into a variable number of tiles.
    video: whether it accepts videos. queries: an image becomes a fixed number of learned queries.
    """

    model_type: str
    mrope: bool
    tiles: bool
    video: bool
    queries: bool = False


FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen2_vl", mrope=True, tiles=False, video=True),
        Family("qwen2_5_vl", mrope=True, tiles=False, video=True),
        Family("qwen3_vl", mrope=True, tiles=False, video=True),
        Family("qwen_vl", mrope=False, tiles=False, video=False, queries=True),
        Family("llava", mrope=False, tiles=False, video=False),
        Family("llava_next", mrope=False, tiles=True, video=False),
        Family("llava_onevision", mrope=False, tiles=True, video=True),
    )
}


def family_of(config: Any) -> Family:
    """The family of a transformers config. Raises UnsupportedModel with the reason."""
    family = FAMILIES.get(str(getattr(config, "model_type", None)))
    if family is None:
        raise unsupported_family(config, FAMILIES)
    refuse_unsupported_parts(config, family.mrope, own_tower=family.mrope or family.queries)
    return family


def patch_flops(config: Any) -> float:
    """Floating-point operations of the vision side's linear layers for one patch."""
    family, vision, hidden = family_of(config), config.vision_config, config.text_config.hidden_size
    width = _tower_width(config)
    inner = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    num_matrices = 3 if family.model_type == "qwen2_5_vl" else 2
    tower = _tower_depth(config) * (4 * width * width + num_matrices * width * inner)
    if family.queries:  # the keys and values of the resampler
        return 2.0 * (tower + width * hidden + 2 * hidden * hidden)
    if not family.mrope:
        return 2.0 * (tower + width * hidden + hidden * hidden)
    # The merger joins this many patches into one row, so its layers have fewer rows by that factor.
    merged = vision.spatial_merge_size**2
    num_mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    return 2.0 * (tower + num_mergers * (merged * width * width + width * hidden))


def encode_patches(config: Any, item: VisionInput) -> int:
    """The cost of encoding an image or video (`VisionInput.num_patches`), from the shapes of its tensors."""
    grid_field = item.fields.get("image_grid_thw" if item.kind == "image" else "video_grid_thw")
    pixels = item.fields.get("pixel_values" if item.kind == "image" else "pixel_values_videos")
    family, vision = family_of(config), config.vision_config
    if pixels is None or (family.mrope and grid_field is None):
        return max(1, item.num_tokens)  # it cannot be encoded; encoding it fails later
    if family.mrope:
        assert grid_field is not None
        num_patches = max(1, pixels.shape[0])
        times = int.from_bytes(grid_field.data[:8], sys.byteorder) if grid_field.dtype == "int64" else 1
        span = num_patches / min(max(1, times), num_patches)  # patches that one patch attends to
        full = getattr(vision, "fullatt_block_indexes", None)
        if full is not None:
            share = len(full) / vision.depth
            window = (vision.window_size / vision.patch_size) ** 2
            span = share * span + (1 - share) * min(window, span)
    else:
        span = (vision.image_size // vision.patch_size) ** 2
        num_patches = span * (pixels.shape[1] if len(pixels.shape) == 5 else 1)
    attention = 4.0 * _tower_depth(config) * _tower_width(config) * span
    flops = num_patches * (patch_flops(config) + attention)
    if family.queries:
        hidden = config.text_config.hidden_size
        flops += vision.num_queries * (2.0 * 3 * hidden * hidden + 4.0 * num_patches * hidden)
    return max(1, round(flops / patch_flops(config)))


def _tower_width(config: Any) -> int:
    vision = config.vision_config
    return int(vision.embed_dim if config.model_type == "qwen2_vl" else vision.hidden_size)


def _tower_depth(config: Any) -> int:
    vision = config.vision_config
    return int(getattr(vision, "depth", None) or vision.num_hidden_layers)


def placeholder_count(config: Any, fields: dict[str, torch.Tensor]) -> int:
    """The number of placeholder tokens of one image, from the image processor's tensors for this image alone.

    Calls the model's own shape functions, on a meta tensor, so that the number always matches the features.
    """
    family = family_of(config)
    if family.mrope:
        return int(fields["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2
    if family.queries:
        return int(config.vision_config.num_queries)
    side = config.vision_config.image_size // config.vision_config.patch_size
    base = side * side
    if not family.tiles:
        # Strategy "default" drops the first embedding, also of a tower without a class token.
        dropped = config.vision_feature_select_strategy == "default"
        return base + CLASS_TOKENS[config.vision_config.model_type] - dropped
    # Imported here, because the modeling files are slow to import and only tiled families need them.
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    if fields["pixel_values"].shape[1] == 1:
        return base + 1
    size = fields["image_sizes"][0]
    rows, columns = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, config.vision_config.image_size)
    packed = unpad_image(torch.empty(1, rows * side, columns * side, device="meta"), size)
    height, width = packed.shape[1:]
    if family.model_type == "llava_onevision":
        most_tiles = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(height * width / (most_tiles * side**2))
        if ratio > 1.1:
            height, width = int(height // ratio), int(width // ratio)
    return base + height * (width + 1)
