"""Checkpoints with weights that are stored quantized: those with a scale per output row, as compressed-tensors writes
them in eight bits, and those of `stored_groups`.

Only the linear layers of the language model are quantized. Every other form is refused by name, before weights are
loaded.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from atmm.formats import FORMATS
from atmm.quantized import QuantizedWeight
from vlora.config import Quantize
from vlora.errors import BadConfig, UnsupportedModel
from vlora.lora.base_weights import tail
from vlora.models.stored_groups import GroupedForm, UnsupportedForm, grouped_form

_WEIGHTS = {"num_bits": (8,), "symmetric": (True,), "dynamic": (False,), "strategy": ("channel", "tensor")}
_INPUTS = {"num_bits": (8,), "symmetric": (True,), "dynamic": (True,), "strategy": ("token",)}
_TYPES: Mapping[tuple[object, object], Quantize] = {
    ("float-quantized", "float"): "fp8",
    ("int-quantized", "int"): "int8",
}
_SCALE = ".weight_scale"
# Of compressed-tensors, GPTQ, AWQ, bitsandbytes, block-wise fp8 and ModelOpt.
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_(packed|scale|scale_inv|zero_point)|input_scale|SCB|weight\.(absmax|quant_\w+))$"
)


def stored_format(config: Any) -> Quantize:
    """The format of a checkpoint's weights, from its transformers config; "none" if they are not quantized.

    Raises:
        UnsupportedModel: They are quantized in another form; the message names it.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return "none"
    if not isinstance(stored, dict):  # transformers has loaded the model in its own form
        raise _unsupported(config, f"quant_method {stored.quant_method.value!r}")
    if config.model_type == "qwen_vl":
        raise UnsupportedModel(
            f"qwen_vl with weights that are stored quantized (quant_method {stored.get('quant_method')!r}) is not "
            "supported, because its files join layers; set quantize int4 for its checkpoint in bfloat16"
        )
    form = stored_groups(config)
    if form is not None:
        return "int4" if form.format.bits == 4 else "int8"
    if stored.get("quant_method") != "compressed-tensors":
        raise _unsupported(config, f"quant_method {stored.get('quant_method')!r}")
    for name in ("kv_cache_scheme", "transform_config"):
        if stored.get(name):
            raise _unsupported(config, f"compressed-tensors with {name}")
    if (stored.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unsupported(config, "compressed-tensors with sparse weights")
    groups = list((stored.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _unsupported(config, f"compressed-tensors with {len(groups)} config_groups")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    if groups[0].get("output_activations"):
        raise _unsupported(config, "compressed-tensors with output_activations")
    found = _TYPES.get((stored.get("format"), weights.get("type")))
    if found is None or inputs.get("type") != weights["type"]:
        raise _unsupported(
            config,
            f"compressed-tensors format {stored.get('format')!r}, weights {weights.get('type')!r}, inputs "
            f"{inputs.get('type')!r}",
        )
    for kind, own, accepted in (("weights", weights, _WEIGHTS), ("input_activations", inputs, _INPUTS)):
        for name, values in accepted.items():
            if own.get(name) not in values:
                raise _unsupported(config, f"compressed-tensors with {name} {own.get(name)!r} of {kind}")
    return found


def stored_groups(config: Any) -> GroupedForm | None:
    """How a checkpoint's weights are stored by groups; None if they are not. Raises UnsupportedModel."""
    stored = getattr(config, "quantization_config", None)
    try:
        return grouped_form(stored) if isinstance(stored, dict) else None
    except UnsupportedForm as error:
        raise _unsupported(config, str(error)) from error


def refuse_unmarked(names: Iterable[str]) -> None:
    """Refuse tensors of quantized weights in a checkpoint whose config does not say how they are stored.

    transformers would ignore scales, and take values for weights.

    Raises:
        BadConfig: One of the tensors' names is of a quantized weight.
    """
    if found := next(filter(_QUANTIZED.search, names), None):
        raise BadConfig(
            f"the checkpoint has {found}, a tensor of weights that are stored quantized, but its config.json has no "
            "quantization_config; copy config.json of the quantized model, or use the checkpoint in bfloat16"
        )


@contextlib.contextmanager
def scales_expected() -> Iterator[None]:
    """Context in which transformers does not warn of scales, which are in a checkpoint and not in a model."""

    def is_about_more(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "UNEXPECTED" not in text or any(word in text for word in ("MISSING", "MISMATCH", "CONVERSION"))

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_about_more)
    try:
        yield
    finally:
        logger.removeFilter(is_about_more)


def language_linears(model: Any) -> dict[str, Any]:
    """The linear layers of a transformers model's language model by name, without the output head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("model.language_model.") and module is not head
    }


def restore_stored(model: Any, files: Sequence[str], quantize: Quantize, *, keep: bool) -> None:
    """Restore the weights of a language model's linear layers from their stored values and scales.

    Args:
        quantize: The checkpoint's format.
        keep: Whether the layers also keep values and scales, as `quantized` of `StoredLinear`.

    Raises:
        BadConfig: A layer has no scales in the files, or other values.
        UnsupportedModel: Other layers are quantized, too.
    """
    weight_format, scales = FORMATS[quantize], _read_scales(files)
    for name, module in language_linears(model).items():
        scale = scales.pop(tail(f"{name}{_SCALE}"), None)
        if scale is None or scale.numel() not in (1, module.out_features):
            raise BadConfig(
                f"the checkpoint is stored in {quantize}, but has no {name}{_SCALE} for every output of the layer; "
                "its files are incomplete, or it was quantized in part"
            )
        weight = module.weight.data
        values = weight.to(weight_format.value_dtype)
        if not torch.equal(values.to(weight.dtype), weight):
            raise BadConfig(f"the checkpoint is stored in {quantize}, but {name}.weight has other values")
        by_row = scale.float().reshape(-1, 1).expand(module.out_features, 1).contiguous()
        held: Any = QuantizedWeight(values, by_row, weight.dtype, weight_format)
        module.weight.data = held.float().to(weight.dtype)
        if keep:
            module.quantized = held
    if scales:
        raise UnsupportedModel(
            f"{next(iter(scales))} in the checkpoint is for a layer outside the language model's linear layers, which "
            "alone may be quantized"
        )


def _read_scales(files: Sequence[str]) -> dict[str, torch.Tensor]:
    """The scales of all layers, by the tail of their names."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.keys() if name.endswith(_SCALE)]  # noqa: SIM118 (not a mapping)
                for name in names:
                    if tail(name) in found:
                        raise UnsupportedModel(f"two layers of the checkpoint have scales named {tail(name)}")
                    found[tail(name)] = tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BadConfig(f"cannot read the scales of {file}: {error}") from error
    return found


def _unsupported(config: Any, form: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{config.model_type} with weights that are stored quantized ({form}) is not supported; served are "
        "compressed-tensors' fp8 and int8 with a scale per output and per token, GPTQ, AWQ (gemm) and "
        "compressed-tensors' pack-quantized in groups of 32, 64, 128 or all inputs. Use the checkpoint in bfloat16 or "
        "float16; quantize fp8, int8 or int4 rounds its weights at load"
    )
