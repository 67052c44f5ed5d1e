"""The adapter from which a training begins."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from vlora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, other_weights
from vlora.errors import BadPlan
from vlora.training.adapter import PREFIX, LoraSettings

_ENDS = ".lora_A.weight", ".lora_B.weight"


class Start(NamedTuple):
    """factors: A [r, d_in] and B [d_out, r] by layer. digest: of the files."""

    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    digest: str


def read_start(folder: Path, settings: LoraSettings, name: str) -> Start:
    """Read an adapter in the form that `TrainableLora.save` writes.

    Raises:
        BadPlan: It cannot be read, or has another rank or scale.
    """
    try:
        if problem := other_weights(folder):
            raise ValueError(problem)
        text, weights = (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()
        config = json.loads(text)
        found = config["r"], config["lora_alpha"], config.get("use_rslora", False)
        tensors = load(weights)
        layers = {key.removeprefix(PREFIX).removesuffix(_ENDS[0]) for key in tensors if key.endswith(_ENDS[0])}
        factors = {one: (tensors[PREFIX + one + _ENDS[0]], tensors[PREFIX + one + _ENDS[1]]) for one in sorted(layers)}
        if 2 * len(factors) != len(tensors):
            raise ValueError("it has other tensors than the factors of LoRA")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise BadPlan(f"`start` of training {name!r}, {folder}, cannot be read: {error}") from error
    wanted = settings.rank, settings.alpha, settings.rslora
    if found != wanted:
        raise BadPlan(
            f"`start` of training {name!r}, {folder}, has (rank, alpha, rslora) {found}; the training has {wanted}"
        )
    return Start(factors, hashlib.blake2b(text + weights, digest_size=16).hexdigest())
