"""The parts of models that are supported: an allow-list of text models, vision towers and rotary embeddings.

Attention that is not implemented here (sliding windows, bidirectional image tokens, ...) would give wrong answers
without an error, so every part that is not listed is rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vlora.errors import UnsupportedModel

TEXT_MODELS = frozenset(("llama", "qwen2", "mistral", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"))

CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision tower of the LLaVA families -> class tokens before an image's patches. The Qwen families have their own."""

# Types of rotary embeddings with frequencies that do not depend on the length of a sequence.
_FIXED_ROPES = frozenset(("default", "linear", "yarn", "llama3"))
# Types with other frequencies for sequences longer than `max_positions`. transformers selects them by the longest
# position of the whole batch, so one long request would change the answers of the others.
_BOUNDED_ROPES = frozenset(("dynamic", "longrope"))

_WHY_NOT = {
    "gemma3": "its image tokens attend to each other in both directions",
    "gemma4": "its image tokens attend to each other in both directions",
    "paligemma": "its prompt attends in both directions",
    "mllama": "it reads images through cross-attention layers",
    "qwen3_5": "it has linear-attention layers",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")


def unsupported_family(config: Any, families: Iterable[str]) -> UnsupportedModel:
    model_type = getattr(config, "model_type", None)
    text = getattr(config, "text_config", config)
    why = _WHY_NOT.get(str(model_type)) or _experts(text) or "its layers have not been checked against this engine"
    return UnsupportedModel(f"model type {model_type!r} is not supported: {why}. Supported: {', '.join(families)}")


def _experts(text: Any) -> str:
    """Why a text model with experts is not supported; empty for one without."""
    field = next((name for name in _EXPERTS if getattr(text, name, None)), None)
    return (
        ""
        if field is None
        else (f"it is a mixture of experts ({field} {getattr(text, field)}), and only dense layers are implemented")
    )


def refuse_unsupported_parts(config: Any, mrope: bool, own_tower: bool) -> None:
    """Raises UnsupportedModel with the reason.

    Args:
        mrope: Whether the family's positions have three rows.
        own_tower: Whether the family has one type of vision tower only.
    """
    family, text = config.model_type, config.text_config
    if text.model_type not in TEXT_MODELS:
        why = _experts(text)
        raise UnsupportedModel(
            f"{family} with a text model of type {text.model_type!r} is not supported{f': {why}' * bool(why)}; "
            f"supported text models: {', '.join(sorted(TEXT_MODELS))}"
        )
    layer_types = getattr(text, "layer_types", None) or ()
    windowed = [kind for kind in layer_types if kind != "full_attention"]
    if windowed or (text.model_type == "mistral" and getattr(text, "sliding_window", None)):
        kind = windowed[0] if windowed else "sliding_attention"
        raise UnsupportedModel(f"{family} with {kind} layers is not supported: only full attention is implemented")
    tower = config.vision_config.model_type
    if not own_tower and tower not in CLASS_TOKENS:
        raise UnsupportedModel(
            f"{family} with a vision tower of type {tower!r} is not supported; supported vision towers: "
            f"{', '.join(CLASS_TOKENS)}"
        )
    rope = _rope_type(text)
    # M-RoPE's time indices of a video may exceed the number of tokens, so a bound on tokens does not bound positions.
    if rope not in _FIXED_ROPES and (mrope or rope not in _BOUNDED_ROPES):
        raise UnsupportedModel(
            f"{family} with rope_type {rope!r} is not supported: its rotary frequencies may differ between the "
            f"requests of a batch; supported types: {', '.join(sorted(_FIXED_ROPES))}"
        )


def max_positions(text: Any) -> int:
    """Maximum tokens of a request on a text model, from its config.

    With `longrope` these are the tokens of its original context, up to which the rotary frequencies are constant; with
    `dynamic` they are constant up to the model's maximum.
    """
    longest = int(text.max_position_embeddings)
    if _rope_type(text) != "longrope":
        return longest
    return min(longest, int(text.rope_parameters["original_max_position_embeddings"]))


def _rope_type(text: Any) -> str:
    return str((getattr(text, "rope_parameters", None) or {}).get("rope_type", "default"))
