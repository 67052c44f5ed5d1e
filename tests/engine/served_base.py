"""Engines that serve their base model to clients, in a thread, with checkpoints and adapters for them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import warnings
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from tests.processors import write_checkpoint
from vlora.config import EngineConfig, ServedBase
from vlora.engine import LocalEngine
from vlora.memory.arena import PAGE_BYTES
from vlora.models.pretrained import from_pretrained
from vlora.types import Request, SamplingParams

T = TypeVar("T")


def plain_model(folder: str) -> Any:
    """The checkpoint as a client loads it."""
    return from_pretrained(AutoModelForImageTextToText, folder, dtype=torch.float32).eval().requires_grad_(False)


def config(folder: str, *addresses: str, **settings: Any) -> EngineConfig:
    base = ServedBase(addresses=addresses, name="tiny") if addresses else None
    fields = {"model": folder, "dtype": "float32", "threads": 1, "block_size": 8, "max_batch_size": 4}
    fields |= {"arena_bytes": 1024 * PAGE_BYTES, "switching": "shadow", "prefix_cache": False}
    return EngineConfig(**{**fields, "serve_base": base, **settings})


class Running:
    """A `LocalEngine` with its event loop in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.local = LocalEngine(config)
        self.wait(self.local.stats())  # the engine's thread begins with the first call

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _answer(self, request: Request) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        async for output in self.local.generate(request):
            assert output.error is None
            found += tuple(output.token_ids)
        return found

    def answers(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """The tokens of requests that run at the same time."""

        async def together() -> list[tuple[int, ...]]:
            return list(await asyncio.gather(*map(self._answer, requests)))

        return self.wait(together())

    def close(self) -> None:
        self.wait(self.local.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def running(config: EngineConfig) -> Iterator[Running]:
    engine = Running(config)
    try:
        yield engine
    finally:
        engine.close()


def write_adapter(folder: Path, model: Any) -> str:
    """A LoRA of the language model with large factors, in PEFT's format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = get_peft_model(
            copy.deepcopy(model),
            LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"),
        )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    peft.save_pretrained(str(folder))
    return str(folder)


def request(number: int, adapter: str | None, num_tokens: int = 8) -> Request:
    generator = torch.Generator().manual_seed(number)
    ids = tuple(torch.randint(4, 150, (7,), generator=generator).tolist())
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return Request(request_id=f"r{number}", prompt_ids=ids, adapter=adapter, sampling=sampling)


__all__ = ["Running", "config", "plain_model", "request", "running", "write_adapter", "write_checkpoint"]
