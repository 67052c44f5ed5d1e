"""`vlora serve` on the embedded model, and adapters for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from fusion.embedded import checkpoint_path
from vlora.bench.dummy import write_head
from vlora.bench.serve.server_process import ServerProcess, launched_server
from vlora.config import EngineConfig
from vlora.models.loading import load_model

HEAD, _QUESTION = "kind", "what shape is shown ?"


@contextlib.contextmanager
def embedded_model_server(adapters: Path, *flags: str, threads: int = 1) -> Iterator[ServerProcess]:
    """Run the embedded model in float32 with the adapters of a folder on loopback until the end of the block."""
    ports = ("--rpyc-port", "0", "--http-port", "0", "--threads", str(threads))
    with launched_server(
        "vlora.cli", "serve", "--dtype", "float32", "--adapters", str(adapters), *ports, *flags
    ) as server:
        yield server


def write_embedded_adapter(folder: Path, seed: int, **settings: Any) -> None:
    """An adapter of rank 8 on every language layer of the embedded model, with a head of one frame. PEFT's initial
    factors change no answer; settings: further ones of `LoraConfig`.
    """
    torch.manual_seed(seed)
    model = load_model(EngineConfig(model=str(checkpoint_path()), dtype="float32"))
    linears = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    config = LoraConfig(r=8, lora_alpha=8, target_modules=linears, **settings)
    get_peft_model(model, config).save_pretrained(str(folder))
    hidden = model.config.text_config.hidden_size
    write_head(folder, HEAD, hidden, ("disc", "board", "rings"), "classification", _QUESTION)
