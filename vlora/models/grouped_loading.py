"""Loads a checkpoint with weights that are stored by groups of inputs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig

from vlora.lora.base_weights import checkpoint_files
from vlora.models.pretrained import from_pretrained, load_complete
from vlora.models.stored_groups import GroupedFiles, GroupedForm
from vlora.models.stored_quantized import language_linears


def load_grouped(name: str, config: Any, form: GroupedForm, dtype: torch.dtype, *, keep: bool) -> Any:
    """Load a transformers model on the host. Everything is checked before anything is loaded.

    Args:
        name: A folder or hub name.
        config: Its transformers config, without `quantization_config`.
        form: How its weights are stored.
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
