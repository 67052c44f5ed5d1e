"""Module names of adapters that differ from those of the base model's layers.

They were saved before transformers 5 renamed the modules of vision-language models, or are those of the code that comes
with the checkpoints of Qwen-VL.
"""

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

# Output head and token embedding: (a module by which the family is known, pattern, current name). As in transformers,
# they are renamed only in the families that had these names.
_LLAVA, _EMBEDDING = "model.multi_modal_projector.linear_1", "model.language_model.embed_tokens"
_SHARED = (
    (_LLAVA, r"language_model\.lm_head", "lm_head"),
    (_LLAVA, r"language_model\.(model\.)?embed_tokens", _EMBEDDING),
    (_EMBEDDING, r"model\.language_model\.model\.embed_tokens", _EMBEDDING),
    ("model.visual.merger.mlp.0", r"model\.embed_tokens", _EMBEDDING),
)

# Qwen-VL's published code: the names of its decoder's layers are those of Qwen's text models too.
_QWEN_VL_LAYER = re.compile(r"^transformer\.h\.(?P<number>\d+)\.(?P<leaf>\w+\.\w+)$")
_QWEN_VL_LEAVES = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.w1": ("mlp.up_proj",),
    "mlp.w2": ("mlp.gate_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
_QWEN_VL_OTHERS = (
    (r"^transformer\.wte$", "model.language_model.embed_tokens"),
    (r"^transformer\.visual\.", "model.visual."),
)
_RESAMPLER = "model.visual.attn_pool.attn.q_proj"  # of Qwen-VL only


def decoder_layers(name: str) -> tuple[str, ...]:
    """The layers of Qwen-VL's decoder that its published code names `name`: several are one below the other in it.

    The result is empty if that code has no such layer.
    """
    found = _QWEN_VL_LAYER.match(name)
    if found is None:
        return ()
    at = f"model.language_model.layers.{found['number']}"
    return tuple(f"{at}.{leaf}" for leaf in _QWEN_VL_LEAVES.get(found["leaf"], ()))


def _candidates(name: str, known: Container[str]) -> Iterator[str]:
    yield name
    if _RESAMPLER in known:
        yield from (re.sub(pattern, target, name) for pattern, target in _QWEN_VL_OTHERS)
        yield from layers if len(layers := decoder_layers(name)) == 1 else ()
    yield from (target for family, old, target in _SHARED if re.fullmatch(old, name) and family in known)
    if name.endswith((".lm_head", ".embed_tokens")):
        return
    renamed = [re.sub(pattern, target, name) for pattern, target in _RENAMES if re.match(pattern, name)]
    yield from renamed
    for candidate in (name, *renamed):
        for pattern, target in _TOWER:
            yield re.sub(pattern, target, candidate, count=1)


def resolve(name: str, known: Container[str]) -> str | None:
    """The current name of module `name`, or None if the model has no such module."""
    return next((candidate for candidate in _candidates(name, known) if candidate in known), None)


def fused_sites(name: str, known: Container[str]) -> tuple[str, ...]:
    """The base model's layers that module `name` is, if these are several: its outputs are theirs, in this order."""
    layers = decoder_layers(name) if _RESAMPLER in known else ()
    return layers if len(layers) > 1 and all(layer in known for layer in layers) else ()
