"""A base server in a thread of this process, and models to serve."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.families import build_model, make_prompt
from vlora.config import Token
from vlora.split import transport
from vlora.split.admission import Limits
from vlora.split.base_server import BaseServer
from vlora.split.batching import CallQueue
from vlora.split.executor import BaseExecutor
from vlora.split.layers import frozen_layers
from vlora.split.serving import address_of
from vlora.wire.address import Address

MODELS = ("qwen2_vl", "llava", "gpt2")


def tiny(family: str) -> Any:
    """A tiny model in float32, with random weights of a fixed seed."""
    if family != "gpt2":
        return build_model(family).requires_grad_(False)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=200, n_positions=64, n_embd=64, n_layer=3, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0)
    config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.6 / parameter.shape[0] ** 0.5 if parameter.ndim > 1 else 0.05
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.requires_grad_(False).eval()


def example(family: str, model: Any, seed: int, num_images: int = 1) -> dict[str, torch.Tensor]:
    """A sequence with an image, where the model takes one, as arguments of the model."""
    if family == "gpt2":
        ids = torch.randint(3, 180, (1, 20), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return make_prompt(family, model, seed, num_images=num_images).kwargs


@dataclasses.dataclass(frozen=True)
class Serving:
    """unix, tcp: addresses of a running server."""

    unix: str
    tcp: str
    server: BaseServer
    executor: BaseExecutor


@contextlib.contextmanager
def serving(
    model: Any,
    folder: Path,
    *,
    shard: tuple[int, int] = (0, 1),
    limits: Limits | None = None,
    tokens: Sequence[Token] = (),
    tls: ssl.SSLContext | None = None,
    queue: CallQueue[Any] | None = None,
) -> Iterator[Serving]:
    """Serve a copy of a model until the block ends."""
    limits = limits or Limits()
    executor = BaseExecutor(frozen_layers(copy.deepcopy(model)), name="tiny", shard=shard)
    server = BaseServer(executor, CallQueue() if queue is None else queue, limits, tokens=tokens, tls=tls)
    sockets = [
        transport.listen(Address.parse(address)) for address in (f"unix:{folder}/base{shard[0]}.sock", "127.0.0.1:0")
    ]
    unix, tcp = map(address_of, sockets)
    for sock in sockets:
        server.listen(sock)
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop.is_set,), name="base-server")
    thread.start()
    try:
        yield Serving(unix, tcp, server, executor)
    finally:
        stop.set()
        thread.join()
