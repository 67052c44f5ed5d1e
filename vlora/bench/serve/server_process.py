"""A running server of a benchmark, and adapters for the embedded model."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from peft import LoraConfig, get_peft_model

from fusion.embedded import checkpoint_path
from vlora.bench.dummy import write_head
from vlora.bench.harness import module_command
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.models.loading import load_model

_ENDING_S = 20.0


class ServerProcess(NamedTuple):
    """Ports of both APIs, and the process of its front end."""

    rpyc_port: int
    http_port: int
    front_end: psutil.Process


@contextlib.contextmanager
def launched_server(module: str, *arguments: str) -> Iterator[ServerProcess]:
    """Run the server of a module until the end of the block."""
    command, environment = module_command(module, *arguments)
    own = {name: value for name, value in environment.items() if not name.startswith("VLORA_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)
    # A signal that ends the bench also ends its server: the block exits as after an error.
    terminated = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        assert process.stdout is not None
        ready = re.match(r"ready: rpyc \S+:(\d+) \| http \S+:(\d+) ", process.stdout.readline())
        if ready is None:
            raise BadConfig("the server of this bench did not start; see its output above")
        yield ServerProcess(int(ready[1]), int(ready[2]), psutil.Process(process.pid))
    finally:
        signal.signal(signal.SIGTERM, terminated)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


HEAD, _QUESTION = "kind", "what shape is shown ?"


def served(*flags: str) -> AbstractContextManager[ServerProcess]:
    """Run `vlora serve` on loopback until the end of the block; the embedded model by default."""
    return launched_server("vlora.cli", "serve", "--rpyc-port", "0", "--http-port", "0", *flags)


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
