"""Starts a base server: loads the model, listens, serves until stopped."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
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

from vlora.config import ServedBase
from vlora.errors import BadConfig
from vlora.models.pretrained import from_pretrained, load_complete
from vlora.split import transport
from vlora.split.admission import Limits
from vlora.split.base_server import BaseServer
from vlora.split.batching import CallQueue
from vlora.split.config import BaseConfig
from vlora.split.executor import BaseExecutor
from vlora.split.layers import frozen_layers
from vlora.split.peer import Peer
from vlora.wire.address import Address, secured, warn_of_no_tls
from vlora.wire.tls import server_context


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


class Listeners:
    """Bound sockets of a base server: an address in use is reported before the model loads."""

    def __init__(self, served: ServedBase) -> None:
        """Raises BadConfig if an address or the certificate cannot be used."""
        self._served = served
        self._tls = server_context(served)
        self._sockets: list[socket.socket] = []
        addresses = secured(served.addresses, has_tokens=bool(served.tokens))
        if self._tls is None:
            warn_of_no_tls(addresses)
        try:
            self._sockets += map(transport.listen, addresses)
        except BaseException:
            self.close()
            raise

    def server(self, executor: BaseExecutor, queue: CallQueue[Peer], limits: Limits) -> BaseServer:
        """A server, which closes the sockets at its end."""
        server = BaseServer(executor, queue, limits, tokens=self._served.tokens, tls=self._tls)
        for sock in self._sockets:
            server.listen(sock)
        return server

    def close(self) -> None:
        for sock in self._sockets:
            transport.close_listener(sock)

    def __str__(self) -> str:
        return ", ".join(map(address_of, self._sockets))


def serve_base(
    config: BaseConfig, served: ServedBase, *, announce: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    """Serve until stopped.

    Args:
        announce: Called with one line when clients may connect.

    Raises:
        BadConfig: The model, an address or the device cannot be used.
    """
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise BadConfig(f"device {config.device!r} is not known to torch; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadConfig(f"device {config.device!r} was requested, but torch finds no CUDA device")
    listeners = Listeners(served)
    try:
        model = load_base(config.model, config.dtype)
        layers = frozen_layers(model)
        del model  # embeddings and norms are the clients'
        executor = BaseExecutor(layers, name=served.name, shard=config.part, device=device)
        del layers
        queue: CallQueue[Peer] = CallQueue(join_rows=config.join_rows)
        server = listeners.server(executor, queue, Limits())
    except BaseException:
        listeners.close()
        raise
    index, number = config.part
    shard = f", shard {index + 1}/{number}" if number > 1 else ""
    announce(
        f"ready: base model {served.name} on {listeners}{shard} "
        f"({executor.num_layers} layers, {executor.num_bytes / 2**20:.0f} MiB in {config.device})"
    )
    server.run(stopped)


def address_of(sock: socket.socket) -> str:
    name = sock.getsockname()
    return str(Address("", 0, name) if isinstance(name, str) else Address(*name[:2]))
