"""Starts a base server: loads the model, listens, serves until stopped."""

from __future__ import annotations

import dataclasses
import pickle
import socket
import ssl
from collections.abc import Callable, Sequence
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

from vlora.config import Token
from vlora.errors import BadConfig
from vlora.models.pretrained import from_pretrained, load_complete
from vlora.split import transport
from vlora.split.admission import Limits
from vlora.split.base_server import BaseServer
from vlora.split.batching import CallQueue
from vlora.split.executor import BaseExecutor
from vlora.split.layers import frozen_layers
from vlora.split.peer import Peer
from vlora.wire.address import Address


def load_base(model: str, dtype: str = "auto") -> Any:
    """Load a vision-language or text model. Not bound to the serving engine's families.

    A client loads the same checkpoint with the same class (AutoModelForImageTextToText, or AutoModelForCausalLM for
    text models), so that the names of its layers are the same.

    Args:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What to serve, and how calls are batched.

    Attributes:
        shard: Index and number of the executors that share the outputs of every layer.
        max_wait_s: Maximum time that a call waits for others; 0 computes together only what is there.
        join_rows: Calls with more rows are computed by themselves.
    """

    model: str
    name: str
    dtype: str = "auto"
    device: str = "cpu"
    shard: tuple[int, int] = (0, 1)
    max_wait_s: float = 0.01
    join_rows: int = 64
    limits: Limits = dataclasses.field(default_factory=Limits)


def serve_base(
    settings: ServeSettings,
    addresses: Sequence[str],
    *,
    announce: Callable[[str], None],
    stopped: Callable[[], bool],
    tokens: Sequence[Token] = (),
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until stopped.

    Args:
        addresses: HOST:PORT or unix:PATH of each listening socket.
        announce: Called with one line when clients may connect.
        tls: For TCP; Unix sockets never use it.

    Raises:
        BadConfig: The model, an address or the device cannot be used.
    """
    try:
        device = torch.device(settings.device)
    except RuntimeError as error:
        raise BadConfig(f"device {settings.device!r} is not known to torch; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadConfig(f"device {settings.device!r} was requested, but torch finds no CUDA device")
    listeners: list[socket.socket] = []
    try:
        listeners += [transport.listen(Address.parse(address)) for address in addresses]
        model = load_base(settings.model, settings.dtype)
        layers = frozen_layers(model)
        del model  # embeddings and norms are the clients'
        executor = BaseExecutor(layers, name=settings.name, shard=settings.shard, device=device)
        del layers
        queue: CallQueue[Peer] = CallQueue(max_wait_s=settings.max_wait_s, join_rows=settings.join_rows)
        server = BaseServer(executor, queue, settings.limits, tokens=tokens, tls=tls)
        for sock in listeners:
            server.listen(sock)
        index, number = settings.shard
        shard = f", shard {index + 1}/{number}" if number > 1 else ""
        bound = ", ".join(map(address_of, listeners))
        announce(
            f"ready: base model {settings.name} on {bound}{shard} "
            f"({executor.num_layers} layers, {executor.num_bytes / 2**20:.0f} MiB in {settings.device})"
        )
        server.run(stopped)
    finally:
        for sock in listeners:
            sock.close()


def address_of(sock: socket.socket) -> str:
    name = sock.getsockname()
    return str(Address("", 0, name) if isinstance(name, str) else Address(*name[:2]))
