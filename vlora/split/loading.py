"""Loads the checkpoint of an executor's layers: any model of transformers with frozen linear layers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from vlora.errors import BadConfig
from vlora.models.pretrained import from_pretrained, load_complete


def load_base(model: str, dtype: str = "auto") -> Any:
    """Load a vision-language or text model. Not bound to the serving engine's families.

    A client loads the same checkpoint with the same class (AutoModelForImageTextToText, or AutoModelForCausalLM for
    text models), so that the names of its layers are the same.

    Args:
        model: Folder or hub name.
        dtype: Precision of the weights; auto: the checkpoint's.

    Raises:
        BadConfig: The checkpoint cannot be loaded, or is quantized.
    """
    hint = "" if Path(model).is_dir() else "; there is no folder of that name either"
    try:
        config = from_pretrained(AutoConfig, model)
        if getattr(config, "quantization_config", None) is not None:
            raise BadConfig(f"{model!r} is quantized; a base executor needs weights in floating point")
        text_only = (
            type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        )
        kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
        loaded = load_complete(kind, model, dtype="auto" if dtype == "auto" else getattr(torch, dtype), config=config)
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise BadConfig(f"cannot load the base model {model!r}: {error}{hint}") from error
    return loaded.eval().requires_grad_(False)
