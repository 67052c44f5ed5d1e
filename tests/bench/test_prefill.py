"""The prefill bench counts the operations that the engine performs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vlora.bench.dummy import small_config
from vlora.bench.engine.prefill import prefill_flops
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import dummy_model
from vlora.types import Request, SamplingParams


@pytest.mark.parametrize("step_tokens", (64, 7))
def test_counted_operations_are_those_of_the_layers(step_tokens: int) -> None:
    config, num_tokens = small_config(), 40
    model = dummy_model(config, "float32", torch.device("cpu"), 0)
    settings = EngineConfig(model="dummy", max_batch_size=1, max_step_tokens=step_tokens, arena_bytes=2**26)
    local = LocalEngine(settings, model=model)
    done = 0

    def count(module: nn.Linear, given: tuple[Any, ...], _: Any) -> None:
        nonlocal done
        done += 2 * given[0].numel() * module.out_features

    hf_model = local.engine.parts.device.hf_model
    last: Any = hf_model.text_model.layers[-1]
    limited = {last.self_attn.q_proj, last.self_attn.o_proj}  # they get all rows, and compute one
    for layer in hf_model.language_linears.values():
        if layer not in limited:
            layer.register_forward_hook(count)
    local.run([Request(request_id="a", prompt_ids=tuple(range(3, 43)), sampling=SamplingParams(max_tokens=1))])
    text: Any = config.text_config
    hidden, context = text.hidden_size, num_tokens * (num_tokens + 1) // 2
    attention = 4 * hidden * ((text.num_hidden_layers - 1) * context + num_tokens)
    rest = 2 * (2 * hidden * hidden) + 2 * hidden * text.vocab_size  # q and o of one row, and the output head
    assert done + attention + rest == prefill_flops(text, num_tokens)
