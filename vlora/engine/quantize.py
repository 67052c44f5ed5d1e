"""The configured format of the base weights, and whether the device and the layers allow it."""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from atmm import formats
from atmm.formats import FORMATS
from atmm.quantized import WeightFormat
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.models.hf_model import HFModel
from vlora.models.loading import read_config
from vlora.models.stored_quantized import stored_format, stored_groups

log = logging.getLogger(__name__)


def with_stored_format(config: EngineConfig) -> EngineConfig:
    """The configuration with the format in which the model's weights are stored, if they are.

    Raises:
        BadConfig: The model is not readable or not supported, or the settings do not allow the format.
    """
    stored = stored_format(read_config(config.model))
    if stored == "none":
        return config
    if config.quantize not in ("none", stored):
        raise BadConfig(f"quantize is {config.quantize}, but the checkpoint is stored in {stored}; set quantize none")
    if config.tensor_parallel > 1:
        raise BadConfig(
            f"tensor_parallel is not possible with a checkpoint that is stored in {stored}; use the checkpoint in "
            f"bfloat16 with quantize {stored}"
        )
    return dataclasses.replace(config, quantize=stored)


def check_device(config: EngineConfig, device: torch.device) -> None:
    """Check that a device has products in the configured format, before a model is loaded. A slow one logs a warning.

    Raises:
        BadConfig: The device has no such products.
    """
    integers = config.quantize in ("int8", "int4")
    if config.quantize == "none" or (integers and (device.type == "cuda" or formats.multiplies_int8())):
        return
    if device.type == "cpu":
        log.warning(
            "quantize %s on this CPU: every product restores its weights, which is slower than quantize none; %s",
            config.quantize,
            "inputs are not rounded" if config.quantize == "int4" else "the answers are the same up to rounding",
        )
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < formats.FP8_CAPABILITY:
        raise BadConfig(
            f"quantize fp8 needs a GPU of compute capability {_version(formats.FP8_CAPABILITY)} or higher; "
            f"{torch.cuda.get_device_name(device)} has {_version(capability)}; set quantize none"
        )


def format_of(config: EngineConfig, device: torch.device, hf_model: HFModel) -> WeightFormat | None:
    """The format of the language model's target weights. None: they are used as loaded.

    Raises:
        BadConfig: The device has no products in the format for one of the layers.
    """
    if config.quantize == "none":
        return None
    linears: dict[str, nn.Linear] = {**hf_model.language_linears}
    if config.quantize_head:
        linears["lm_head"] = hf_model.lm_head
    for name, linear in linears.items() if device.type == "cuda" and config.quantize == "fp8" else ():
        if linear.weight.dtype is not torch.bfloat16:
            raise BadConfig(f"quantize fp8 on a GPU needs dtype bfloat16; the weights are {linear.weight.dtype}")
        if linear.in_features % formats.FP8_ALIGNMENT or linear.out_features % formats.FP8_ALIGNMENT:
            raise BadConfig(
                f"quantize fp8 on a GPU needs layers with sizes that are multiples of {formats.FP8_ALIGNMENT}; "
                f"{name} has {linear.out_features} x {linear.in_features}; set quantize none"
            )
    stored = stored_groups(hf_model.model.config)
    weight_format: WeightFormat = FORMATS[config.quantize] if stored is None else stored.format
    for name, linear in linears.items():
        if linear.in_features % weight_format.alignment:
            raise BadConfig(
                f"quantize {config.quantize} needs layers with inputs in multiples of {weight_format.alignment}; "
                f"{name} has {linear.in_features}; set quantize int8"
            )
    return weight_format


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
