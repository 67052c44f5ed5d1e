"""Shared by the parts of the bench: the extent of a run, the model, and the form of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2VLForConditionalGeneration

from vlora.bench.dummy import ranks_config

TRAIN = {"do": "train", "steps": 1, "rows": 2, "length": 64}
"""Training steps of 128 tokens."""


class Mix(NamedTuple):
    """Extent of the measurement of decoding beside training."""

    layers: int  # of the model
    inference: int  # clients without training. training: of them are replaced by trainings
    training: int
    prompt: int  # tokens of a prompt, and of a row of a training step
    answer: int  # tokens of an answer
    requests: int  # of each inference client in a window
    rounds: int  # windows of each way


class Size(NamedTuple):
    """Extent of a run. clients: numbers of clients of the memory's measurement. rows: of table 5's clients."""

    layers: int
    clients: tuple[int, ...]
    rounds: int
    tokens: int
    rows: tuple[int, ...]
    mix: Mix


FULL = Size(
    layers=8,
    clients=(1, 4, 8),
    rounds=5,
    tokens=16,
    rows=(1, 1, 2, 4, 8, 16, 32, 64),
    mix=Mix(layers=4, inference=8, training=2, prompt=64, answer=64, requests=2, rounds=2),
)
QUICK = Size(
    layers=5,
    clients=(1, 2),
    rounds=5,
    tokens=16,
    rows=(1, 2, 16, 48),
    mix=Mix(layers=2, inference=4, training=1, prompt=64, answer=32, requests=2, rounds=1),
)


def write_checkpoint(folder: Path, num_layers: int) -> Path:
    """A model of layers with 15 million parameters each, in float32."""
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(ranks_config(num_layers)).save_pretrained(folder / "model")
    return folder / "model"


def row(what: str, way: str, **values: Any) -> dict[str, Any]:
    """A row of the report."""
    names = ("clients", "executor MiB", "clients MiB", "all MiB", "ratio", "tokens a second")
    more = ("latency ms", "first token ms", "calls a product", "prefill", "generation", "training", "executor busy")
    return {"what": what, "way": way} | dict.fromkeys((*names, *more, "curves")) | values
