"""How a request's image tokens lie in its pictures: what a head that reads them must know to say where things are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heads import Grid
from vlora.models.families import family_of
from vlora.models.processing import to_tensor
from vlora.types import VisionInput


def why_no_grid(config: Any) -> str | None:
    """Why a model's image tokens form no grid, or None where they do."""
    family = family_of(config)
    if family.tiles:
        return f"{family.model_type} cuts a picture into tiles and adds an overview"
    if not family.mrope and config.vision_feature_select_strategy == "full":
        return f"this {family.model_type} has a token that belongs to no place in the picture"
    return None


def image_grids(config: Any, vision: Sequence[VisionInput]) -> tuple[Grid, ...]:
    """The grid of every picture, and of every time step of a video, in the order of `vision`. None at all for models
    whose tokens form no grid."""
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
