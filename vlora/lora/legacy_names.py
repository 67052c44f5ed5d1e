"""Module names of adapters saved before transformers 5 renamed the modules of vision-language models."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

# (pattern, replacement), tried first alone and then combined with `_TOWER`. The left sides are the names in published
# adapters; the right sides are the current names.
_RENAMES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^model\.language_model\.model\.", "model.language_model."),
    (r"^language_model\.", "model.language_model."),
    (r"^model\.layers\.", "model.language_model.layers."),
    (r"^visual\.", "model.visual."),
    (r"^vision_tower\.", "model.vision_tower."),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
)
_TOWER = (
    (r"\.vision_tower\.vision_model\.", ".vision_tower."),
    (r"\.vision_tower\.", ".vision_tower.vision_model."),
)


def _candidates(name: str) -> Iterator[str]:
    yield name
    renamed = [re.sub(pattern, target, name) for pattern, target in _RENAMES if re.match(pattern, name)]
    yield from renamed
    for candidate in (name, *renamed):
        for pattern, target in _TOWER:
            yield re.sub(pattern, target, candidate, count=1)


def resolve(name: str, known: Container[str]) -> str | None:
    """The current name of module `name`, or None if the model has no such module."""
    return next((candidate for candidate in _candidates(name) if candidate in known), None)
