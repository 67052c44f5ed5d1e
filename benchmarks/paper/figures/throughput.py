"""Figures of throughput with many adapters against PEFT, and of batching: S-LoRA's table 3, Punica's 1, 10 and 11."""

from __future__ import annotations

import dataclasses
import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.figures.punica_operator import segments
from benchmarks.paper.measured.engine_steps import adapter_folders, engine_in_mode
from benchmarks.paper.measuring import LIMIT_S, QUICK_MODEL, Measuring, Setting
from vlora.bench.dummy import language_shapes, random_peft, write_adapter
from vlora.bench.report import Goal
from vlora.bench.timing import interleaved, median_ms, work_seconds
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import dummy_model
from vlora.simulator.popularity import power_law
from vlora.simulator.workloads import PATTERNS
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
    peft = random_peft(model, rank, max(requests) + 1)
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


# -- S-LoRA, table 3 --------------------------------------------------------------------------------------------------

_ADAPTERS = (5, 100)


def _measure_many(measuring: Measuring) -> dict[str, Any]:
    setting = measuring.setting
    count = 32 if setting.quick else 64
    ours, peft = [], []
    for number in _ADAPTERS:
        requests = random.Random(0).choices(range(number), power_law(number, 1.0), k=count)
        ours.append(engine_rate(setting, requests, number, rank=8))
        peft.append(peft_rate(setting, requests, rank=8))
    return {"adapters": list(_ADAPTERS), "here": ours, "PEFT": peft}


def _many_panels(found: Found) -> list[Panel]:
    groups = [f"{number} adapters" for number in found["adapters"]]
    return [drawing.bars(groups, {"this project": found["here"], "PEFT": found["PEFT"]}, ylabel="requests/s")]


def _many_here(found: Found) -> dict[str, float | None]:
    here: dict[str, float | None] = {
        f"S-LoRA / PEFT, {number} adapters": ours / peft
        for number, ours, peft in zip(found["adapters"], found["here"], found["PEFT"], strict=True)
    }
    return here | {"throughput with 100 / 5 adapters": found["here"][-1] / found["here"][0]}


def _many_goals(found: Found) -> list[Goal]:
    ratios = [ours / peft for ours, peft in zip(found["here"], found["PEFT"], strict=True)]
    return [Goal("s-lora table3: throughput here / PEFT, worst", min(ratios), 1.0, False)]


# -- Punica, figure 11 ------------------------------------------------------------------------------------------------


def _measure_patterns(measuring: Measuring) -> dict[str, Any]:
    """Answer tokens per second by popularity pattern."""
    setting = measuring.setting
    count = 32
    found: dict[str, Any] = {"patterns": list(PATTERNS), "here": [], "PEFT": []}
    for pattern in PATTERNS:
        requests = [place for place, number in enumerate(segments(pattern, count)) for _ in range(number)]
        random.Random(1).shuffle(requests)
        found["here"].append(ANSWER * engine_rate(setting, requests, max(requests) + 1, rank=16))
        found["PEFT"].append(ANSWER * peft_rate(setting, requests, rank=16))
    return found


def _pattern_panels(found: Found) -> list[Panel]:
    series = {"this project": found["here"], "transformers and PEFT": found["PEFT"]}
    return [drawing.bars(found["patterns"], series, ylabel="answer tokens/s")]


def _patterns_here(found: Found) -> dict[str, float | None]:
    return {"distinct / identical, here or Punica": found["here"][0] / found["here"][-1]}


def _pattern_goals(found: Found) -> list[Goal]:
    return [Goal("punica fig11: throughput here / PEFT, distinct", found["here"][0] / found["PEFT"][0], 1.0, False)]


# -- Punica, figures 1 and 10 -----------------------------------------------------------------------------------------

_PREFILLED = 8  # requests at most on a CPU


def _measure_batching(measuring: Measuring) -> dict[str, Any]:
    setting = measuring.setting
    batches = (1, 8, 32)
    lengths = (64, 256) if setting.quick else (128, 512)
    found: dict[str, Any] = {"batches": list(batches), "lengths": list(lengths), "prefill": {}, "decode": {}}
    clock = work_seconds(setting.device)
    for length in lengths:
        engine = engine_in_mode(setting, {}, merging=False, context=length, longest=160)
        prefills: list[float | None] = []
        for batch in batches:
            if setting.device.type == "cpu" and batch > _PREFILLED:  # in the same steps of 512 tokens, for minutes
                prefills.append(None)
                continue
            prefill = {"ms": lambda n=batch, e=engine, own=length: e.prefill([None] * n, own * n)}
            taken = interleaved(prefill, 1 if setting.quick else 3, warmup=0, clock=clock, limit_s=LIMIT_S)["ms"]
            prefills.append(median_ms(taken))
        step = engine.begin([None] * max(batches))
        decode: dict[int, float] = {}
        for batch in sorted(batches, reverse=True):
            engine.keep(batch)
            decode[batch] = median_ms(interleaved({"ms": step}, 3 * setting.rounds, clock=clock)["ms"])
        found["prefill"][str(length)] = prefills
        found["decode"][str(length)] = [decode[batch] for batch in batches]
    return found


def _batching_panels(found: Found) -> list[Panel]:
    panels = []
    for phase in ("prefill", "decode"):
        curves = {f"{length} tokens": values for length, values in found[phase].items()}
        labels: dict[str, Any] = {"title": phase, "xlabel": "batch", "ylabel": "ms of a step"}
        panels.append(drawing.lines(curves, found["batches"], ylim=(0, None), **labels))
    return panels


def _batching_here(found: Found) -> dict[str, float | None]:
    decode = [found["decode"][str(length)] for length in found["lengths"]]
    return {name: own[-1] / own[0] for name, own in zip(("short sequences", "longer sequences"), decode, strict=True)}


def _batching_goals(found: Found) -> list[Goal]:
    worst = max(own[-1] / own[0] for own in found["decode"].values())
    return [Goal("punica fig1: decode step of batch 32 / of batch 1", worst, 32.0, True)]


def _measure_layers(measuring: Measuring) -> dict[str, Any]:
    setting = measuring.setting
    if setting.device.type == "cpu":  # the other layers would only add minutes
        setting = dataclasses.replace(setting, model=QUICK_MODEL)
    batches = (1, 8, 32)
    lengths = (64,) if setting.quick else (128, 512)
    found: dict[str, Any] = {"batches": list(batches), "lengths": list(lengths), "ms": {}}
    layers = setting.model.config().text_config.num_hidden_layers
    clock = work_seconds(setting.device)
    with adapter_folders(setting.model, max(batches), rank=16) as folders:
        for length in lengths:
            engine = engine_in_mode(setting, folders, merging=False, context=length, longest=80)
            by_pattern: dict[str, list[float]] = {pattern: [] for pattern in PATTERNS}
            for pattern in PATTERNS:
                for batch in batches:
                    counts = enumerate(segments(pattern, batch))
                    step = engine.begin([f"a{place}" for place, number in counts for _ in range(number)])
                    taken = interleaved({"ms": step}, 2 * setting.rounds, warmup=4, clock=clock)["ms"]
                    by_pattern[pattern].append(median_ms(taken) / layers)
                    engine.keep(0)
            found["ms"][str(length)] = by_pattern
    return found


def _layer_panels(found: Found) -> list[Panel]:
    labels: dict[str, Any] = {"xlabel": "batch", "ylabel": "ms of a layer"}
    return [
        drawing.lines(curves, found["batches"], title=f"sequences of {length} tokens", ylim=(0, None), **labels)
        for length, curves in found["ms"].items()
    ]


def _layers_here(found: Found) -> dict[str, float | None]:
    own = found["ms"][str(found["lengths"][0])]
    return {name: 100 * (own[name][-1] / own[name][0] - 1) for name in ("identical", "distinct")}


CODE = {
    "s-lora:table3": Code(_measure_many, _many_panels, _many_here, _many_goals),
    "punica:fig1": Code(_measure_batching, _batching_panels, _batching_here, _batching_goals),
    "punica:fig10": Code(_measure_layers, _layer_panels, _layers_here),
    "punica:fig11": Code(_measure_patterns, _pattern_panels, _patterns_here, _pattern_goals),
}
