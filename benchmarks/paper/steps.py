"""Steps of the engine in a chosen mode, and full queues on the engine and on PEFT: figures 6, 7 and 20 of V-LoRA, 1, 10
and 11 of Punica, table 3 of S-LoRA.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atmm.tuning.search import Shape
from benchmarks.paper.figure import QUICK_MODEL, RANK, Measuring, Setting
from benchmarks.paper.operators import OURS, medians, operator_seconds, segments_of
from vlora.bench.dummy import random_peft
from vlora.bench.report import Row
from vlora.bench.timed_engine import FixedModePolicy, TimedEngine
from vlora.bench.timing import interleaved, median_ms, work_seconds
from vlora.models.loading import dummy_model
from vlora.simulator.arrivals import power_law

_LIMIT_S = 60.0  # of the rounds of one comparison: on a CPU, prompts of 4,096 tokens take up to a minute
_PREFILLED = 8  # requests at most on a CPU
_PROMPT, _ANSWER, _BATCH = 32, 16, 32  # tokens, tokens, requests of a full queue


def _engine(setting: Setting, number: int, rank: int = RANK, **given: Any) -> TimedEngine:
    """An engine with adapters a0, a1, ... that computes every prompt; further arguments of `TimedEngine`."""
    model = dummy_model(setting.model.config(), "bfloat16", setting.device, seed=0)
    settings = {"max_batch_size": _BATCH, "arena_bytes": setting.model.arena_bytes, **given}
    return TimedEngine(model, {f"a{place}": rank for place in range(number)}, **settings)


def _requests(segments: Sequence[int]) -> list[str]:
    """The adapter of each request: so many for a0, a1, ..."""
    return [f"a{place}" for place, number in enumerate(segments) for _ in range(number)]


def compare(
    measuring: Measuring,
    cases: Sequence[Mapping[str, Any]],
    rounds: int,
    decode: bool = False,
    operators: Sequence[str] = (),
) -> list[Row]:
    """Milliseconds of prefills in several modes, and what they take more than the first of them.

    Args:
        cases: `tokens` of each prompt, and by mode the requests of each adapter. Modes other than "unmerged" use merged
            weights.
        rounds: Of a quick run; nine take three times as many.
        decode: Whether decode steps are measured too.
        operators: Others, whose time for all of the model's sites is measured alone.
    """
    setting = measuring.setting
    clock, turns = work_seconds(setting.device), rounds * setting.rounds // 3
    most = max(case["tokens"] * sum(case["unmerged"]) for case in cases)
    rows: list[Row] = []
    engines = {
        merging: _engine(
            setting,
            max(len(case["unmerged"]) for case in cases),
            parts={"policy": FixedModePolicy(merging=merging)},
            context=32,
            longest=400,
            max_step_tokens=most,
        )
        for merging in (True, False)
    }
    for case in cases:
        modes = {name: _requests(own) for name, own in case.items() if isinstance(own, list)}
        about = {name: value for name, value in case.items() if name not in modes}
        calls = {
            mode: functools.partial(engines[mode != "unmerged"].prefill, own, len(own) * case["tokens"])
            for mode, own in modes.items()
        }
        times = {"prefill": interleaved(calls, turns, warmup=1, clock=clock, limit_s=_LIMIT_S)}
        if decode:
            times["decode"] = {}
            for mode, own in modes.items():  # one engine runs one batch after the other
                step = engines[mode != "unmerged"].begin(own)
                times["decode"] |= interleaved({mode: step}, 2 * turns, warmup=4, clock=clock)
                engines[mode != "unmerged"].keep(0)
        for phase, seconds in times.items():
            ms = {mode: median_ms(taken) for mode, taken in seconds.items()}
            merged = ms["merged"]
            rows += [
                {**about, "phase": phase, "mode": mode, "operator": OURS, "ms": value, "more": value - merged}
                for mode, value in ms.items()
            ]
        if operators:
            alone = _operators_alone(setting, case["unmerged"], case["tokens"], operators)
            rows += [{**about, "mode": "alone", "operator": name, "more": ms} for name, ms in alone.items()]
    return rows


def _operators_alone(
    setting: Setting, segments: Sequence[int], tokens: int, operators: Sequence[str]
) -> dict[str, float]:
    """Milliseconds that other operators take for all sites of the model."""
    layers = dummy_model(setting.model.config(), "bfloat16", torch.device("meta"), seed=0).model.language_model.layers  # type: ignore[attr-defined]
    total: dict[str, float] = {}
    for module in layers[0].modules():
        if isinstance(module, torch.nn.Linear):
            shape, lanes = Shape(module.in_features, (module.out_features,)), [tokens * number for number in segments]
            taken = medians(operator_seconds(setting, shape, RANK, lanes, setting.rounds, operators))
            for name, seconds in taken.items():
                if name != OURS:
                    total[name] = total.get(name, 0.0) + 1e3 * len(layers) * seconds
    return total


def by_batch(
    measuring: Measuring,
    lengths: Sequence[int],
    batches: Sequence[int],
    patterns: Sequence[str | None],
    prefills: bool = False,
) -> list[Row]:
    """Milliseconds of steps by length of the sequences, popularity pattern (None: no adapters) and batch. prefills:
    whether these are measured too; otherwise only decode steps, on a CPU of a model of six layers.
    """
    setting = measuring.setting
    on_cpu = setting.device.type == "cpu"
    if on_cpu and not prefills:  # the other layers would only add minutes
        setting = dataclasses.replace(setting, model=QUICK_MODEL)
    num_layers = setting.model.config().text_config.num_hidden_layers
    clock = work_seconds(setting.device)
    rows: list[Row] = []
    number = 0 if None in patterns else max(batches)
    for length in lengths:
        engine = _engine(
            setting,
            number,
            rank=16,
            parts={"policy": FixedModePolicy()},
            context=length,
            longest=80,
        )
        for pattern, batch in itertools.product(patterns, batches):
            own = [None] * batch if pattern is None else _requests(segments_of(pattern, batch))
            times = {}
            # More prefills run in the same steps of 512 tokens, on a CPU for minutes.
            if prefills and not (on_cpu and batch > _PREFILLED):
                prefill = {"ms": functools.partial(engine.prefill, own, batch * length)}
                rounds = setting.rounds // 3
                times["prefill"] = interleaved(prefill, rounds, warmup=0, clock=clock, limit_s=_LIMIT_S)["ms"]
            step = engine.begin(own)
            times["decode"] = interleaved({"ms": step}, 2 * setting.rounds, warmup=4, clock=clock)["ms"]
            engine.keep(0)
            for phase, taken in times.items():
                ms = median_ms(taken)
                about = {"phase": phase, "length": length, "pattern": pattern, "batch": batch}
                rows.append({**about, "ms": ms, "ms of a layer": ms / num_layers})
    return rows


def queue(
    measuring: Measuring,
    requests: int,
    rank: int,
    adapters: Sequence[int] = (),
    patterns: Sequence[str] = (),
) -> list[Row]:
    """Requests and answer tokens per second of work when all are queued at once, by number of adapters (of power-law
    popularity) or by popularity pattern.
    """
    cases: dict[Any, tuple[int, list[int]]] = {
        number: (number, random.Random(0).choices(range(number), power_law(number, 1.0), k=requests))
        for number in adapters
    }
    for pattern in patterns:
        segments = segments_of(pattern, requests)
        own = [place for place, number in enumerate(segments) for _ in range(number)]
        random.Random(1).shuffle(own)
        cases[pattern] = len(segments), own
    rows: list[Row] = []
    for case, (number, own) in cases.items():
        rates = {OURS: _engine_rate(measuring.setting, own, number, rank)}
        rates["PEFT"] = _peft_rate(measuring.setting, own, number, rank)
        rows += [
            {"case": case, "system": system, "requests/s": rate, "tokens/s": _ANSWER * rate}
            for system, rate in rates.items()
        ]
    return rows


def _engine_rate(setting: Setting, requests: Sequence[int], num_adapters: int, rank: int) -> float:
    """Requests per second after a warm-up with the first of them. requests: the adapter of each."""
    engine, clock = _engine(setting, num_adapters, rank), work_seconds(setting.device)
    started = 0.0
    for own in (requests[:8], requests):
        started = clock()
        for adapter in own:
            engine.add(_PROMPT, _ANSWER, f"a{adapter}")
        engine.finish()
    return len(requests) / (clock() - started)


def _peft_rate(setting: Setting, requests: Sequence[int], num_adapters: int, rank: int) -> float:
    """As `_engine_rate`, for PEFT: the queue's first request decides the adapter, up to 32 requests for it are one
    batch, and a batch ends with its last token (S-LoRA 7.1; Punica 7 without the cost of switching).
    """
    model = dummy_model(setting.model.config(), setting.baseline_dtype, setting.device, seed=0)
    peft = random_peft(model, rank, num_adapters)
    clock = work_seconds(setting.device)
    _answer(peft, 1)
    waiting = list(requests)
    started = clock()
    while waiting:
        chosen = waiting[0]
        own = [place for place, adapter in enumerate(waiting) if adapter == chosen][:_BATCH]
        peft.set_adapter(f"a{chosen}")
        _answer(peft, len(own))
        waiting = [adapter for place, adapter in enumerate(waiting) if place not in own]
    return len(requests) / (clock() - started)


@torch.inference_mode()
def _answer(model: Any, batch: int) -> None:
    device = next(model.parameters()).device
    prompts = torch.arange(batch * _PROMPT, device=device).view(batch, _PROMPT) % 1000 + 3
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=_ANSWER,
        min_new_tokens=_ANSWER,
        do_sample=False,
        pad_token_id=0,
    )
