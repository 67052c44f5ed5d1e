"""Grids of image tokens: the positions of a request's tokens in its images, which detection heads need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heads import Grid
from vlora.models.families import family_of
from vlora.models.processing import to_tensor
from vlora.types import VisionInput


def why_no_grid(config: Any) -> str | None:
    """The reason why a model's image tokens form no grid, or None if they form one."""
    family = family_of(config)
    if family.tiles:
        return f"{family.model_type} divides an image into tiles and adds a downscaled copy"
    if family.queries:
        return f"{family.model_type} reduces an image to learned queries, which have no position in it"
    if not family.mrope and config.vision_feature_select_strategy == "full":
        return f"this {family.model_type} has an image token without a position in the image"
    return None


def image_grids(config: Any, vision: Sequence[VisionInput]) -> tuple[Grid, ...]:
    """The grid of every image, and of every time step of a video, in the order of `vision`.

    The result is empty for models with image tokens that form no grid.
    """
    if why_no_grid(config) is not None:
        return ()
    grids: list[Grid] = []
    for item in vision:
        if family_of(config).mrope:
            times, rows, columns = to_tensor(item.fields[f"{item.kind}_grid_thw"])[0].tolist()
            merged = config.vision_config.spatial_merge_size
            grids += [(rows // merged, columns // merged)] * times
        else:
            side = config.vision_config.image_size // config.vision_config.patch_size
            grids.append((side, side))
    return tuple(grids)
