"""The supported model families and their differences. Any other model is rejected with the reason."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

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


def placeholder_count(config: Any, fields: Mapping[str, Any]) -> int:
    """The number of placeholder tokens of one image, from the image processor's arrays for this image alone."""
    family = family_of(config)
    if family.mrope:
        return int(fields["image_grid_thw"].prod()) // int(config.vision_config.spatial_merge_size**2)
    if family.queries:
        return int(config.vision_config.num_queries)
    side = config.vision_config.image_size // config.vision_config.patch_size
    base = int(side * side)
    if not family.tiles:
        # Strategy "default" drops the first embedding, also of a tower without a class token.
        dropped = config.vision_feature_select_strategy == "default"
        return base + CLASS_TOKENS[config.vision_config.model_type] - dropped
    if fields["pixel_values"].shape[1] == 1:
        return base + 1
    rows, columns = _unpadded_grid(config, side, *fields["image_sizes"][0].tolist())
    return base + rows * (columns + 1)


def _unpadded_grid(config: Any, side: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the embeddings of a tiled image: `unpad_image` of transformers, for the shape alone."""
    from transformers.image_processing_utils import select_best_resolution

    pixels = config.vision_config.image_size
    rows, columns = (
        length // pixels * side for length in select_best_resolution((height, width), config.image_grid_pinpoints)
    )
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if config.model_type == "llava_onevision":
        most_tiles = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most_tiles * side**2))
        if ratio > 1.1:
            return int(rows // ratio), int(columns // ratio)
    return rows, columns
