"""Prefill speed relative to the speed of a large matrix product in the same run.

Prefill is compute-bound. The peak is taken from torch's own float32 product of large square matrices; a processor with
bfloat16 instructions may exceed it in bfloat16. The work of a prompt is counted from shapes: linear layers of the
computed rows, and causal attention.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vlora.bench.dummy import half_billion_config
from vlora.bench.report import Report
from vlora.bench.timing import thread_counts, threads
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import dummy_model
from vlora.types import Request, SamplingParams

_PROMPT = 2048
_WIDTHS = (128, 256, 512, 1024, 2048)  # tokens per step
_PEAK_SIDE = 2048


def run(quick: bool) -> Report:
    """Prompts of 2,048 tokens in a 0.5 B-parameter model, by tokens per step; in both types, on one thread and on all.

    Args:
        quick: A sixth of the model's layers, fewer rounds.
    """
    rows = []
    for number in thread_counts():
        with threads(number):
            for dtype in ("float32", "bfloat16"):
                rows += _prefills(dtype, number, num_layers=4 if quick else 24, rounds=2 if quick else 5)
    return Report("prefill", rows, [])


def prefill_flops(text_config: Any, num_tokens: int) -> int:
    """Floating-point operations of one prompt, up to the output of its last token, in any number of chunks.

    The last layer computes keys and values of all tokens, and the rest for the last token only.

    Args:
        text_config: Of the language model of a Qwen2-VL.
        num_tokens: Tokens of the prompt.
    """
    hidden, inner = text_config.hidden_size, text_config.intermediate_size
    heads, layers = text_config.num_attention_heads, text_config.num_hidden_layers
    kv_width = text_config.num_key_value_heads * (hidden // heads)
    keys_and_values = 2 * hidden * kv_width
    others = 2 * hidden * hidden + 3 * hidden * inner
    context = num_tokens * (num_tokens + 1) // 2  # attended tokens, over all queries
    products = (layers * keys_and_values + (layers - 1) * others) * num_tokens + others
    attention = 2 * hidden * ((layers - 1) * context + num_tokens)
    return 2 * (products + attention + hidden * text_config.vocab_size)


def _prefills(dtype: str, num_threads: int, num_layers: int, rounds: int) -> list[dict[str, Any]]:
    config = half_billion_config(num_layers)
    prefill = _prefill(config, dtype)
    left, right = torch.rand(2, _PEAK_SIDE, _PEAK_SIDE)
    calls: dict[int, Callable[[], object]] = {width: functools.partial(prefill, width) for width in _WIDTHS}
    calls[0] = functools.partial(torch.mm, left, right)
    seconds: dict[int, list[float]] = {key: [] for key in calls}
    # Alternate, so that a change of the machine's speed affects all of them; the first round warms up.
    for turn in range(rounds + 1):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            if turn:
                seconds[key].append(time.perf_counter() - started)
    peak = 2 * _PEAK_SIDE**3 / statistics.median(seconds[0]) / 1e9
    flops = prefill_flops(config.text_config, _PROMPT)
    rows = []
    for width in _WIDTHS:
        took = statistics.median(seconds[width])
        reached = flops / took / 1e9
        rows.append(
            {
                "dtype": dtype,
                "threads": num_threads,
                "layers": num_layers,
                "tokens a step": width,
                "us a token": took / _PROMPT * 1e6,
                "ms a step": took * width / _PROMPT * 1e3,
                "GFLOP/s": reached,
                "float32 product GFLOP/s": peak,
                "share": reached / peak,
            }
        )
    return rows


def _prefill(config: Any, dtype: str) -> Callable[[int], None]:
    """A function that prefills one prompt in chunks of a number of tokens."""
    settings = EngineConfig(
        model="dummy", max_batch_size=1, max_step_tokens=_PROMPT, arena_bytes=2**28, prefix_cache=False
    )
    engine = LocalEngine(settings, model=dummy_model(config, dtype, torch.device("cpu"), 0)).engine
    prompt = tuple(torch.randint(3, 1000, (_PROMPT,), generator=torch.Generator().manual_seed(0)).tolist())

    def prefill(width: int) -> None:
        engine.parts.scheduler.budget.max_step_tokens = width
        engine.add(Request(request_id="prompt", prompt_ids=prompt, sampling=SamplingParams(max_tokens=1)))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error

    return prefill
