"""Loads a base model by folder or hub name, or creates one with random weights in the shapes of its config."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText

from vlora.config import EngineConfig
from vlora.errors import BadConfig, VLoraError
from vlora.lora.base_weights import broken_files, checkpoint_files, pickled_files
from vlora.models.families import family_of
from vlora.models.grouped_loading import load_grouped
from vlora.models.pretrained import from_pretrained, load_complete
from vlora.models.stored_quantized import restore_stored, scales_expected, stored_format, stored_groups
from vlora.models.supported import max_positions

log = logging.getLogger(__name__)

_HUB_HINT = (
    "; there is no folder of that name either. Set a folder with the checkpoint's files, or set HTTPS_PROXY for a "
    "proxy, HF_ENDPOINT for a mirror of the hub, HF_HOME for a writable cache"
)


def load_model(config: EngineConfig, rank: int = 0) -> Any:
    """Load the whole transformers model in eval mode. Raises BadConfig, UnsupportedModel.

    With one rank the model is on its device. With several ranks, or if its weights are to be quantized, it may be
    larger than a device, so its weights stay memory-mapped files on the CPU, read on access, until `sharding.shard` or
    `lay_out` moves them to the device.
    """
    device = device_of(config, rank)
    model_config = read_config(config.model)
    _warn_of_shorter_context(model_config.text_config)
    if config.load_format == "dummy":
        return dummy_model(model_config, config.dtype, device, config.seed)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    stored = stored_format(model_config)
    plain = copy.copy(model_config)
    if stored != "none":
        del plain.quantization_config  # the values are loaded as they are
    keep, groups = config.quantize == stored, stored_groups(model_config)
    try:
        if groups is not None:
            model = load_grouped(config.model, plain, groups, dtype, keep=keep)
        else:
            with contextlib.nullcontext() if stored == "none" else scales_expected():
                model = load_complete(AutoModelForImageTextToText, config.model, dtype=dtype, config=plain)
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise BadConfig(f"cannot load the weights of {config.model!r}: {_reason(config.model, error)}") from error
    if groups is not None:
        model.config.quantization_config = model_config.quantization_config
    elif stored != "none":
        restore_stored(model, checkpoint_files(config.model), stored, keep=keep)
    fits = config.tensor_parallel == 1 and config.quantize == "none"
    return _ready(model, device if fits else torch.device("cpu"))


def _reason(model: str, error: Exception) -> str:
    """Why weights cannot be loaded: the first broken file, or the error if its cause is none."""
    with contextlib.suppress(OSError, ValueError):
        if broken := broken_files(checkpoint_files(model) or pickled_files(model)):
            return broken[0]
    return str(error)


def _warn_of_shorter_context(text: Any) -> None:
    served = max_positions(text)
    if served < text.max_position_embeddings:
        log.warning(
            "rope_type %r: requests are limited to %d of the model's %d tokens, up to which its rotary frequencies do "
            "not depend on the length",
            text.rope_parameters["rope_type"],
            served,
            text.max_position_embeddings,
        )


def read_config(model: str) -> Any:
    """The transformers config of a folder or hub name. Raises BadConfig, UnsupportedModel."""
    try:
        model_config = from_pretrained(AutoConfig, model)
    except (OSError, ValueError) as error:
        raise BadConfig(f"cannot load model {model!r}: {error}{_HUB_HINT * (not Path(model).is_dir())}") from error
    except VLoraError:
        raise
    except Exception as error:  # transformers checks fields with errors of several types, or not at all
        raise BadConfig(f"cannot load model {model!r}: its config.json is not valid: {error}") from error
    family_of(model_config)
    return model_config


def dummy_model(model_config: Any, dtype: str, device: torch.device, seed: int) -> Any:
    """A model with random weights, for performance measurements that do not depend on the values."""
    family_of(model_config)
    torch_dtype = (model_config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(model_config, trust_remote_code=False, dtype=torch_dtype)
    return _ready(model, device)


def _ready(model: Any, device: torch.device) -> Any:
    return model.to(device).eval().requires_grad_(False)


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank. With several ranks each has its own GPU, or all share the CPU. Raises BadConfig."""
    name, device = config.device, named_device(config)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadConfig(f"device {name!r} was requested, but torch finds no CUDA device")
    if config.tensor_parallel == 1 or device.type == "cpu":
        return device
    if device.index is not None or torch.cuda.device_count() < config.tensor_parallel:
        raise BadConfig(
            f"tensor_parallel {config.tensor_parallel} on device {name!r} needs that many GPUs, but torch finds "
            f"{torch.cuda.device_count()}; set device cuda, and at most as many ranks as GPUs"
        )
    return torch.device("cuda", rank)


def named_device(config: EngineConfig) -> torch.device:
    """The configured device, which this machine may not have. Raises BadConfig for an unsupported name."""
    name = config.device
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadConfig(f"device {name!r} is not known to torch; use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise BadConfig(f"device {name!r} is not supported; use cpu, cuda or cuda:N")
    return device
