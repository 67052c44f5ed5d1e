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
from peft import LoraConfig, get_peft_model

from vlora.bench.dummy import language_shapes, write_adapter
from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.figures.punica_operator import segments
from vlora.bench.paper.measured.engine_steps import adapter_folders, engine_in_mode
from vlora.bench.paper.measuring import BASELINE_TYPE, LIMIT_S, QUICK_MODEL, Measuring, Setting
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


# -- S-LoRA, table 3 --------------------------------------------------------------------------------------------------

_PAPER_RATES = {5: (8.05, 0.88), 100: (7.99, 0.25)}  # S-LoRA and PEFT, setting S1


def _measure_many(measuring: Measuring) -> dict[str, Any]:
    setting = measuring.setting
    count = 32 if setting.quick else 64
    ours, peft = [], []
    for number in _PAPER_RATES:
        requests = random.Random(0).choices(range(number), power_law(number, 1.0), k=count)
        ours.append(engine_rate(setting, requests, number, rank=8))
        peft.append(peft_rate(setting, requests, rank=8))
    return {"adapters": list(_PAPER_RATES), "here": ours, "PEFT": peft}


def _draw_many(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2, (1, 1.4))
    groups = [f"{number} adapters" for number in found["adapters"]]
    drawing.bars(left, groups, {"this project": found["here"], "PEFT": found["PEFT"]}, ylabel="requests/s")
    drawing.beside(right, _MANY_FACTS, _many_here(found), ylabel="x")


_MANY_FACTS = (
    *(
        Fact(f"S-LoRA / PEFT, {number} adapters", ours / peft, "x", f"Table 3, S1: {ours} and {peft} req/s")
        for number, (ours, peft) in _PAPER_RATES.items()
    ),
    Fact("throughput with 100 / 5 adapters", 7.99 / 8.05, "x", "Table 3, S1: 8.05 and 7.99 req/s"),
)


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


def _draw_patterns(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    series = {"this project": found["here"], "transformers and PEFT": found["PEFT"]}
    drawing.bars(left, found["patterns"], series, ylabel="answer tokens/s")
    drawing.beside(right, _PATTERN_FACTS, _patterns_here(found), ylabel="relative to identical")


_PATTERN_FACTS = (
    Fact("distinct / identical, here or Punica", 1.0, "x", "7.2: 1044 tok/s on the 7B model regardless of workloads"),
)


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


def _draw_batching(found: Found, canvas: Any) -> None:
    left, middle, right = drawing.panels(canvas, 3)
    for axis, phase in ((left, "prefill"), (middle, "decode")):
        curves = {f"{length} tokens": found[phase][length] for length in found[phase]}
        drawing.lines(
            axis, curves, found["batches"], title=phase, xlabel="batch", ylabel="ms of a step", ylim=(0, None)
        )
    drawing.beside(right, _BATCHING_FACTS, _batching_here(found), ylabel="decode step, batch 32 / batch 1")


_BATCHING_FACTS = (
    Fact("short sequences", 13 / 11, "x", "2.1: the decode step from 11 ms to 13 ms with batch 1 to 32"),
    Fact("longer sequences", 34 / 17, "x", "2.1: the decode step from 17 ms to 34 ms with batch 1 to 32"),
)


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


def _draw_layers(found: Found, canvas: Any) -> None:
    *axes, last = drawing.panels(canvas, len(found["lengths"]) + 1)
    for axis, length in zip(axes, found["lengths"], strict=True):
        title = f"sequences of {length} tokens"
        drawing.lines(
            axis,
            found["ms"][str(length)],
            found["batches"],
            title=title,
            xlabel="batch",
            ylabel="ms of a layer",
            ylim=(0, None),
        )
    drawing.beside(last, _LAYER_FACTS, _layers_here(found), ylabel="% more at batch 32 than at 1")


_LAYER_FACTS = (
    Fact(
        "identical", 72, "%", "7.1: the latency only increases by 72 % with batch 1 to 32 at a sequence length of 512"
    ),
    Fact("distinct", 72, "%", "7.1: the layer latency is roughly the same across different workloads"),
)


def _layers_here(found: Found) -> dict[str, float | None]:
    own = found["ms"][str(found["lengths"][0])]
    return {name: 100 * (own[name][-1] / own[name][0] - 1) for name in ("identical", "distinct")}


_QUEUE = f"All requests queued at once; prompts of {PROMPT} and answers of {ANSWER} tokens, random weights."

FIGURES: Sequence[Figure] = (
    Figure(
        paper="s-lora",
        number="table3",
        minutes=9,
        title="throughput against PEFT",
        states="S-LoRA keeps its throughput up to 2,000 adapters; PEFT reaches a ninth of it with 5 adapters, less "
        "with "
        "more; vLLM-packed runs out of memory.",
        caption=f"{_QUEUE} Adapters of rank 8, power-law popularity. PEFT batches the requests of one adapter and "
        f"switches between batches. {BASELINE_TYPE} vLLM-packed needs a GPU; 1,000 and more adapters are in `vlora "
        "bench memory`.",
        measure=_measure_many,
        draw=_draw_many,
        facts=_MANY_FACTS,
        here=_many_here,
        goals=_many_goals,
        size=(11.0, 4.4),
    ),
    Figure(
        paper="punica",
        number="fig1",
        minutes=10,
        title="batching in prefill and decode",
        states="A decode step takes 11 to 13 ms (short) or 17 to 34 ms (long) with batch 1 to 32; prefill is "
        "proportional.",
        caption="Steps of the engine without adapters; sequences of 64 and 256 tokens with --quick, else 128 and 512. "
        "One thread is bound by arithmetic much earlier than an A100; on a CPU, prefills are of up to eight requests.",
        measure=_measure_batching,
        draw=_draw_batching,
        facts=_BATCHING_FACTS,
        here=_batching_here,
        goals=_batching_goals,
        size=(13.0, 4.4),
    ),
    Figure(
        paper="punica",
        number="fig10",
        minutes=6,
        title="latency of a layer by popularity",
        states="The latency of a layer grows by 72 % from batch 1 to 32 and is the same for all popularity patterns.",
        caption="Decode steps of the engine divided by its layers, on a CPU six, adapters of rank 16, unmerged; "
        "sequences of 64 tokens with --quick, else 128 and 512.",
        measure=_measure_layers,
        draw=_draw_layers,
        facts=_LAYER_FACTS,
        here=_layers_here,
        size=(12.0, 4.4),
    ),
    Figure(
        paper="punica",
        number="fig11",
        minutes=9,
        title="text generation by popularity",
        states="Punica generates 1044 tok/s (7B) and 693 tok/s (13B) regardless of popularity; others deteriorate with "
        "several adapters.",
        caption=f"{_QUEUE} Adapters of rank 16; the baseline batches requests of one adapter only. {BASELINE_TYPE}",
        measure=_measure_patterns,
        draw=_draw_patterns,
        facts=_PATTERN_FACTS,
        here=_patterns_here,
        goals=_pattern_goals,
        size=(11.0, 4.4),
    ),
)
