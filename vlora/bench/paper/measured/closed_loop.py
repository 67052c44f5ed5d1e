"""Throughput of a full queue: this engine, and a server over PEFT that batches requests of one adapter at a time."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from vlora.bench.dummy import language_shapes, write_adapter
from vlora.bench.paper.measuring import Setting
from vlora.bench.timing import work_seconds
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import dummy_model
from vlora.types import Request, SamplingParams

PROMPT, ANSWER = 32, 16  # tokens
_BATCH = 32


def engine_rate(setting: Setting, requests: Sequence[int], num_adapters: int, rank: int) -> float:
    """Requests per second of work when all are queued at once, after a warm-up with the first of them.

    Args:
        setting: Its model and device.
        requests: The adapter of each request.
        num_adapters: Registered adapters.
        rank: Of the adapters.
    """
    model = dummy_model(setting.model.config(), "bfloat16", setting.device, seed=0)
    config = EngineConfig(
        model="dummy",
        device=str(setting.device),
        max_batch_size=_BATCH,
        arena_bytes=setting.model.arena_bytes,
        merge_fidelity_floor=0.0,
        prefix_cache=False,
    )
    engine = LocalEngine(config, model=model)
    shapes = language_shapes(model)
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"a{i}": write_adapter(Path(folder) / f"a{i}", shapes, rank, seed=i) for i in range(num_adapters)}
        engine.engine.register_adapters(paths)
        numbers = itertools.count()
        engine.run([_request(next(numbers), adapter) for adapter in requests[:8]])
        queue = [_request(next(numbers), adapter) for adapter in requests]
        clock = work_seconds(setting.device)
        started = clock()
        outputs = engine.run(queue)
        taken = clock() - started
    assert all(output[-1].error is None for output in outputs.values())
    return len(requests) / taken


def _request(number: int, adapter: int) -> Request:
    return Request(
        request_id=str(number),
        prompt_ids=tuple(3 + (number + place) % 1000 for place in range(PROMPT)),
        adapter=f"a{adapter}",
        sampling=SamplingParams(max_tokens=ANSWER, ignore_eos=True),
    )


def peft_rate(setting: Setting, requests: Sequence[int], rank: int) -> float:
    """As `engine_rate`, for PEFT: the queue's first request decides the adapter, up to 32 requests for it are one
    batch, and a batch ends with its last token (S-LoRA 7.1; Punica 7 without the cost of switching).
    """
    model = dummy_model(setting.model.config(), setting.baseline_dtype, setting.device, seed=0)
    kinds = sorted({name.rpartition(".")[2] for name in language_shapes(model)})
    adapted = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=rf".*language_model.*\.({'|'.join(kinds)})", init_lora_weights=False
    )
    peft: Any = get_peft_model(model, adapted, adapter_name="a0")  # type: ignore[arg-type]
    for adapter in sorted(set(requests) - {0}):
        peft.add_adapter(f"a{adapter}", adapted)
    peft = peft.to(getattr(torch, setting.baseline_dtype)).eval()
    clock = work_seconds(setting.device)
    _answer(peft, 1)
    queue = list(requests)
    started = clock()
    while queue:
        chosen = queue[0]
        own = [place for place, adapter in enumerate(queue) if adapter == chosen][:_BATCH]
        peft.set_adapter(f"a{chosen}")
        _answer(peft, len(own))
        queue = [adapter for place, adapter in enumerate(queue) if place not in own]
    return len(requests) / (clock() - started)


@torch.inference_mode()
def _answer(model: Any, batch: int) -> None:
    device = next(model.parameters()).device
    prompts = torch.arange(batch * PROMPT, device=device).view(batch, PROMPT) % 1000 + 3
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=ANSWER,
        min_new_tokens=ANSWER,
        do_sample=False,
        pad_token_id=0,
    )
