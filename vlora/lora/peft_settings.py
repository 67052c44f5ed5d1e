"""The settings of a PEFT configuration: an allow-list, and the rank and scale that they give a layer.

A setting that is not listed is refused by name, so that a setting of a later version of PEFT is never ignored.

Names of layers differ in adapters that were saved before transformers 5 renamed the modules of vision-language models,
and in those of the code that comes with the checkpoints of Qwen-VL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from vlora.errors import BadAdapter
from vlora.wording.shown import shown

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


# Settings that are read, here or in `peft_format`.
_READ = frozenset(
    (
        "peft_type",
        "init_lora_weights",
        "r",
        "rank_pattern",
        "lora_alpha",
        "alpha_pattern",
        "use_rslora",
        "use_bdlora",
        "use_dora",
        "target_parameters",
        "bias",
        "alora_invocation_tokens",
        "lora_bias",
        "modules_to_save",
        "trainable_token_indices",
    )
)
DESCRIPTION_AND_SELECTION = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "task_type",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    )
)
"""Settings that every method has and that describe the adapter or select layers. The file has the selected layers."""
# Further settings without an effect on answers: for training, and options of methods that are refused.
_WITHOUT_EFFECT = frozenset(
    (
        "lora_dropout",
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        "ensure_weight_tying",  # refused where the output head or the token embedding is changed
        "fan_in_fan_out",  # PEFT resets it for linear layers
        "megatron_core",  # used with megatron_config only
        "qalora_group_size",  # used with use_qalora only
        "runtime_config",
    )
)
# Vectors over inputs, of the layers in `feedforward_modules`, have the length of the inputs.
_OF_TOKENS = frozenset(("peft_type", "token_indices", "init_weights"))
_OF_IA3 = frozenset(("peft_type", "feedforward_modules", "fan_in_fan_out", "modules_to_save", "init_ia3_weights"))
# Setting -> why it is not supported.
_REFUSED = {
    "layer_replication": "it changes the number of layers of the base model",
    "use_qalora": "QALoRA pools its inputs",
    "velora_config": "VeLoRA changes how inputs are read",
    "monteclora_config": "MonteCLoRA samples its weights",
    "arrow_config": "Arrow routes between adapters per token",
    "kasa_config": "KaSA truncates the base weights",
    "megatron_config": "it is for a base model of Megatron's layers",
}
_UNKNOWN = "this version does not know it; if it has no effect on inference, remove it from the configuration"

# Initializations that leave the base weights unchanged.
_SERVED_INITS = frozenset(("gaussian", "eva", "orthogonal", "mica"))


def refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    """Raises BadAdapter, with the name of the setting, if a setting in use is not served."""
    kind = config.get("peft_type", "LORA")
    if kind in ("LOHA", "LOKR"):
        raise BadAdapter(
            f"{path}: peft_type is {kind!r}, a dense delta; make it a LoRA with `vlora convert-lora {path} --rank R`"
        )
    if kind == "IA3":
        refuse_others(path, config, DESCRIPTION_AND_SELECTION | _OF_IA3)
        return
    if kind == "TRAINABLE_TOKENS":
        refuse_others(path, config, DESCRIPTION_AND_SELECTION | _OF_TOKENS)
        return
    if kind != "LORA":
        raise BadAdapter(f"{path}: peft_type is {kind!r}; only LORA, IA3 and TRAINABLE_TOKENS adapters are supported")
    refuse_others(path, config, _READ | _WITHOUT_EFFECT | DESCRIPTION_AND_SELECTION)
    if config.get("bias") not in (None, "none", "all", "lora_only"):
        raise BadAdapter(f"{path}: bias = {config['bias']!r} is not supported: PEFT knows none, all and lora_only")
    init = config.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or str(init).lower() in _SERVED_INITS):
        raise BadAdapter(
            f"{path}: init_lora_weights = {init!r} may have changed the base weights while training; "
            "convert the adapter to plain LoRA first (PEFT's path_initial_model_for_weight_conversion)"
        )
    _check_parameters(path, config)


def refuse_others(path: Path, config: Mapping[str, Any], allowed: Set[str]) -> None:
    """Raises BadAdapter if a setting is in use, neither null nor false nor empty, that is not allowed."""
    for setting, value in config.items():
        if setting not in allowed and value not in (None, "", [], {}) and value is not False:
            raise BadAdapter(f"{path}: {setting} = {shown(value)} is not supported: {_REFUSED.get(setting, _UNKNOWN)}")


def scale_of(path: Path, config: Mapping[str, Any], names: tuple[str, ...], rank: int) -> float:
    """The scale of one layer's delta: alpha / r, or alpha / sqrt(r) for rsLoRA.

    Args:
        names: The layer's names, which patterns are matched against as in PEFT.

    Raises:
        BadAdapter: A setting is malformed, or gives the layer another rank than its factors have.
    """
    if any(_is_parameter(config, name) for name in names):
        names = tuple(f"{name}.weight" for name in names)  # PEFT then matches the parameter's name
    configured = number_by_pattern(path, config, "r", "rank_pattern", names, 8)
    if configured != rank:
        raise BadAdapter(
            f"{path}: the factors of {names[0]!r} have rank {rank}, but r and rank_pattern of the configuration give "
            f"{shown(configured)}"
        )
    alpha = number_by_pattern(path, config, "lora_alpha", "alpha_pattern", names, 8)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def invocation_of(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that switch an activated adapter (aLoRA) on; empty for ordinary adapters.

    Raises:
        BadAdapter: The setting is malformed, or PEFT would not apply it.
    """
    tokens = config.get("alora_invocation_tokens")
    if tokens is None:
        return ()
    if not (isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens)):
        raise BadAdapter(f"{path}: alora_invocation_tokens is {shown(tokens)}; it must be a list of token ids")
    if config.get("task_type") != "CAUSAL_LM":
        raise BadAdapter(
            f"{path}: alora_invocation_tokens is set, but task_type is {shown(config.get('task_type'))}; PEFT searches "
            "for invocation tokens with task_type CAUSAL_LM only"
        )
    return tuple(tokens)


def tokens_of(path: Path, config: Mapping[str, Any], module: str) -> tuple[int, ...]:
    """The trainable tokens of a layer, in the order of their weights in the file.

    Raises:
        BadAdapter: The setting is malformed, or does not name the layer.
    """
    setting = "token_indices" if config.get("peft_type") == "TRAINABLE_TOKENS" else "trainable_token_indices"
    tokens = config.get(setting)
    if isinstance(tokens, dict):
        tokens = next((tokens[name] for name in tokens if module.endswith(name)), None)  # as PEFT finds the layer
    valid = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    if not (valid and tokens and len(set(tokens)) == len(tokens)):
        raise BadAdapter(
            f"{path}: {setting} gives {shown(tokens)} for {module!r}; it must be a list of different token ids"
        )
    return tuple(tokens)


def number_by_pattern(
    path: Path, config: Mapping[str, Any], setting: str, by_pattern: str, names: tuple[str, ...], default: int
) -> float:
    """The number of the first pattern that matches one of a layer's names, else the setting's own.

    Raises:
        BadAdapter: A pattern is malformed, or the value is not a finite number.
    """
    value = _by_pattern(path, config, setting, by_pattern, names, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadAdapter(f"{path}: {setting} is {value!r}; it must be a finite number")
    return value


def _by_pattern(
    path: Path, config: Mapping[str, Any], setting: str, by_pattern: str, names: tuple[str, ...], default: int
) -> Any:
    patterns = config.get(by_pattern) or {}
    if not isinstance(patterns, dict):
        raise BadAdapter(f"{path}: {by_pattern} is {shown(patterns)}; it must be an object of numbers by module")
    for pattern, value in patterns.items():
        try:
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                return value
        except re.error as error:
            raise BadAdapter(f"{path}: {by_pattern} has {pattern!r}, which is not a regular expression") from error
    return config.get(setting, default)


def _check_parameters(path: Path, config: Mapping[str, Any]) -> None:
    """Raises BadAdapter if `target_parameters` has other names than of weights."""
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise BadAdapter(f"{path}: target_parameters is {shown(parameters)}; it must be a list of names")
    others = [name for name in parameters if name.rpartition(".")[2] != "weight"]
    if others:
        raise BadAdapter(
            f"{path}: target_parameters has {others[0]!r}, which is not supported: only the weights of linear layers "
            "are adapted"
        )


def _is_parameter(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT adapts the weight of this layer as a parameter."""
    return any(f".{module}.weight".endswith(f".{name}") for name in config.get("target_parameters") or ())
