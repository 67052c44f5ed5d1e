"""Loads a base model by folder or hub name, or creates one with random weights in the shapes of its config."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from vlora.config import EngineConfig
from vlora.errors import BadConfig, VLoraError
from vlora.lora.base_weights import broken_files, checkpoint_files, floating_dtype, pickled_files, stored_tensors
from vlora.models.families import family_of
from vlora.models.pretrained import from_pretrained, load_complete
from vlora.models.stored_groups import GroupedFiles, GroupedForm
from vlora.models.stored_quantized import (
    language_linears,
    refuse_unmarked,
    restore_stored,
    scales_expected,
    stored_format,
    stored_groups,
)
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
    dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    stored, plain = stored_format(model_config), _without_format(model_config)
    keep, groups = config.quantize == stored, stored_groups(model_config)
    try:
        if groups is not None:
            model = load_grouped(config.model, plain, groups, dtype, keep=keep)
        else:
            if stored == "none":
                refuse_unmarked(name for file in _weight_files(config.model) for name in stored_tensors(file))
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


def check_weights(config: EngineConfig, skeleton: Any, linears: Mapping[str, torch.nn.Linear]) -> int:
    """Load the weights of a checkpoint without their values, so that transformers itself finds what is missing.

    Returns:
        The number of files.

    Raises:
        BadConfig: A file is missing or broken, or tensors are missing or have other shapes than the configuration.
        UnsupportedModel: The weights are stored in another form.
    """
    try:
        files = _weight_files(config.model)
    except (OSError, ValueError) as error:
        raise BadConfig(
            "the index of its weights (model.safetensors.index.json or pytorch_model.bin.index.json) is broken: "
            f"{error}; download it again"
        ) from error
    problems = broken_files(files)
    if not files:
        problems = [
            "its weights are not on this machine: there is no model.safetensors, and no model.safetensors.index.json "
            "or pytorch_model.bin.index.json that names its parts; download them"
        ]
    if problems:
        raise BadConfig("; ".join(problems))
    groups = stored_groups(skeleton.config)
    if groups is None:
        tensors = {name: tensor for file in files for name, tensor in stored_tensors(file).items()}
        if stored_format(skeleton.config) == "none":
            refuse_unmarked(tensors)
    else:
        grouped = GroupedFiles(groups, files)
        grouped.check(linears)
        tensors = grouped.tensors(linears, torch.bfloat16)
    with _without_values() as mode:
        values = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        load_complete(type(skeleton), None, config=_without_format(skeleton.config), state_dict=values)
    return len(files)


class _EqualShapes(TorchFunctionMode):
    """Compares tensors without values by their shapes: an output head with the embeddings that it may be tied to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].shape == args[1].shape if func is torch.equal else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_values() -> Iterator[FakeTensorMode]:
    """Context in which transformers loads tensors of shapes only, and does not report what is missing."""
    report, threads = logging.getLogger("transformers.modeling_utils"), "HF_DEACTIVATE_ASYNC_LOAD"
    before = report.disabled, os.environ.get(threads)
    report.disabled, os.environ[threads] = True, "1"  # values would be real in transformers' threads
    try:
        with _EqualShapes(), FakeTensorMode() as mode:
            yield mode
    finally:
        report.disabled = before[0]
        if before[1] is None:
            del os.environ[threads]
        else:
            os.environ[threads] = before[1]


def _without_format(model_config: Any) -> Any:
    """The config of a checkpoint that is stored quantized, whose stored values are loaded as they are."""
    plain = copy.copy(model_config)
    if getattr(plain, "quantization_config", None) is not None:
        del plain.quantization_config
    return plain


def _weight_files(model: str) -> list[str]:
    return checkpoint_files(model) or pickled_files(model)


def _reason(model: str, error: Exception) -> str:
    """Why weights cannot be loaded: the first broken file, or the error if its cause is none."""
    with contextlib.suppress(OSError, ValueError):
        if broken := broken_files(_weight_files(model)):
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
    """The transformers config of a folder or hub name, with the dtype of the weights. Raises BadConfig,
    UnsupportedModel."""
    try:
        model_config = from_pretrained(AutoConfig, model)
    except (OSError, ValueError) as error:
        hint = "; copy or download config.json again" if Path(model).is_dir() else _HUB_HINT
        raise BadConfig(f"cannot load model {model!r}: {error}{hint}") from error
    except VLoraError:
        raise
    except Exception as error:  # transformers checks fields with errors of several types, or not at all
        raise BadConfig(
            f"cannot load model {model!r}: its config.json is not valid: {error}; copy or download it again"
        ) from error
    older = getattr(model_config, "compression_config", None)  # the field's name in early compressed-tensors
    if older is not None and getattr(model_config, "quantization_config", None) is None:
        model_config.quantization_config = older
    family_of(model_config)
    stored_format(model_config)
    settings = cached_file(
        model,
        GENERATION_CONFIG_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    try:  # transformers goes on without the file, and so without the tokens that end an answer
        if settings is not None:
            from_pretrained(GenerationConfig, model)
    except Exception as error:
        raise BadConfig(f"cannot read {settings}: {error}; copy or download it again") from error
    if model_config.dtype is None:  # some checkpoints have it for the text model only, or not at all
        own = getattr(model_config.text_config, "dtype", None)
        model_config.dtype = own or floating_dtype(_weight_files(model))
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


def load_grouped(name: str, config: Any, form: GroupedForm, dtype: torch.dtype, *, keep: bool) -> Any:
    """Load a transformers model on the host. Everything is checked before anything is loaded.

    Args:
        config: Its transformers config, without `quantization_config`.
        dtype: The type of the other weights and of products.
        keep: Whether the language model's linear layers have the stored values, as `quantized` of `StoredLinear`, and a
            `weight` of zeros without memory. Otherwise they have restored weights.

    Raises:
        BadConfig: The files are incomplete.
        UnsupportedModel: The form is not served.
    """
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    linears = language_linears(skeleton)
    files = GroupedFiles(form, checkpoint_files(name))
    files.check(linears)
    # transformers takes tensors in place of a name, and then does not read its generation config.
    tensors = files.tensors(linears, dtype)
    model = load_complete(type(skeleton), None, config=config, state_dict=tensors, dtype=dtype)
    with contextlib.suppress(OSError):  # there is none
        model.generation_config = from_pretrained(GenerationConfig, name)
    for layer, linear in language_linears(model).items():
        held = files.weight(layer, dtype)
        if keep:
            linear.quantized = held
        else:
            linear.weight.data = held.float().to(dtype)
    return model
