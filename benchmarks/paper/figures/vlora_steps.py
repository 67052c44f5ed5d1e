"""V-LoRA's figures of single steps: the switch of modes, task heads, the mixed mode; its table of models."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.heads import latency_rows
from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measured.engine_steps import adapter_folders, engine_in_mode
from benchmarks.paper.measured.machine_costs import switch_times
from benchmarks.paper.measuring import LIMIT_S, QUICK_MODEL, Measuring
from vlora.bench.dummy import MODELS
from vlora.bench.plots import COLORS
from vlora.bench.report import Goal
from vlora.bench.timing import interleaved, median_ms, work_seconds
from vlora.models.loading import dummy_model

# -- Figure 7 ---------------------------------------------------------------------------------------------------------

_TOKENS = 256


def _measure_slots(measuring: Measuring) -> dict[str, Any]:
    """Two inference slots: three requests merged, then four of other adapters unmerged; and the switch between them."""
    setting = measuring.setting
    with adapter_folders(setting.model, 4) as folders:
        engines = {
            merging: engine_in_mode(setting, folders, merging=merging, context=16, longest=2, max_step_tokens=1024)
            for merging in (True, False)
        }
        calls = {
            "merged": lambda: engines[True].prefill(["a0"] * 3, 3 * _TOKENS),
            "unmerged": lambda: engines[False].prefill(list(folders), 4 * _TOKENS),
        }
        seconds = interleaved(calls, setting.rounds, warmup=1, clock=work_seconds(setting.device), limit_s=LIMIT_S)
    return {"ms": {name: median_ms(taken) for name, taken in seconds.items()}, "switch ms": switch_times(measuring)}


def _slot_panels(found: Found) -> list[Panel]:
    return [functools.partial(_draw_slots, found["ms"], found["switch ms"])]


def _draw_slots(ms: Mapping[str, float], switch: Mapping[str, float], axis: Any) -> None:
    ways = {"this project": ("merge", "back"), "PEFT's merge_adapter\n(dLoRA's way)": ("PEFT merge", "PEFT unmerge")}
    for line, (into, back) in enumerate(ways.values()):
        start = 0.0
        spans = [(2, "", switch[into]), (0, "merged, requests 1-3", ms["merged"])]
        spans += [(2, "", switch[back]), (1, "unmerged, 4-7", ms["unmerged"])]
        for color, name, width in spans:
            axis.barh(line, width, left=start, color=COLORS[color], height=0.5, edgecolor="white")
            if name:
                text = f"{name}\n{width:.0f} ms"
                axis.text(start + width / 2, line, text, ha="center", va="center", fontsize=7, color="w")
            start += width
        text = f"merge {switch[into]:.1f} ms, back {switch[back]:.1f} ms (red)"
        axis.text(0, line - 0.32, text, fontsize=8, va="bottom")
    axis.set_yticks(range(len(ways)), list(ways), fontsize=8)
    axis.set(xlabel="ms", ylim=(1.6, -0.7), title="two slots, eight requests of 256 tokens")


def _switch_here(found: Found) -> dict[str, float | None]:
    merged, switch = found["ms"]["merged"], found["switch ms"]
    return {
        "dLoRA's switch": 100 * switch["PEFT merge"] / merged,
        "the swift switch": 100 * switch["merge"] / merged,
    }


def _switch_goals(found: Found) -> list[Goal]:
    switch = found["switch ms"]
    return [Goal("fig7: PEFT merge_adapter / merge here", switch["PEFT merge"] / switch["merge"], 1.0, False)]


# -- Figure 16 --------------------------------------------------------------------------------------------------------


_HEADS_LIMIT_S = 40.0  # as `LIMIT_S`; with it, all shapes together take about ten minutes


def _measure_heads(measuring: Measuring) -> dict[str, Any]:
    return {"rows": latency_rows(measuring.setting.quick, _HEADS_LIMIT_S, with_floor=False)}


def _head_panels(found: Found) -> list[Panel]:
    rows = {(row["tower"], row["batch"], row["frames"], row["answer tokens"]): row for row in found["rows"]}
    cells = list(dict.fromkeys(key[:3] for key in rows))
    tokens = sorted({key[3] for key in rows})
    series = {"task head": [rows[*cell, tokens[0]]["head ms"] for cell in cells]}
    series |= {f"words, {number} tokens": [rows[*cell, number]["words ms"] for cell in cells] for number in tokens}
    labels = [f"{tower}\nbatch {batch}\n{frames} frame{'s' * (frames > 1)}" for tower, batch, frames in cells]
    return [drawing.bars(labels, series, ylabel="ms of a batch")]


def _heads_here(found: Found) -> dict[str, float | None]:
    longest = max(row["answer tokens"] for row in found["rows"])
    less = [row["less %"] for row in found["rows"] if row["answer tokens"] == longest]
    return {"reduction, least": min(less), "reduction, most": max(less)}


def _head_goals(found: Found) -> list[Goal]:
    """Over all cells: where a prompt takes nearly all of the time, the difference in one is within the noise."""
    mean = statistics.geometric_mean(row["ratio"] for row in found["rows"])
    return [Goal("fig16: head / words, geometric mean", mean, 1.0, True)]


# -- Figure 20 --------------------------------------------------------------------------------------------------------

_BATCH = 16
_LEAST_MS = 1e-3  # of extra time; of less, no share can be saved


def _measure_mixture(measuring: Measuring) -> dict[str, Any]:
    """Milliseconds of a prefill and of a decode step of sixteen requests, by how many starve for other adapters."""
    setting = measuring.setting
    counts = (1, 4, 7) if setting.quick else (1, 3, 5, 7, 10)
    found: dict[str, Any] = {"starving": list(counts), "prefill": [], "decode": []}
    with adapter_folders(setting.model, 8) as folders:
        engines = {
            merging: engine_in_mode(setting, folders, merging=merging, context=32, longest=400, max_step_tokens=512)
            for merging in (True, False)
        }
        clock = work_seconds(setting.device)
        for count in counts:
            others = [f"a{1 + place % 7}" for place in range(count)]
            mix = ["a0"] * (_BATCH - count) + others
            prompts: dict[str, Callable[[], object]] = {
                "merged": lambda: engines[True].prefill(["a0"] * _BATCH, 32 * _BATCH),
                "mixed": functools.partial(engines[True].prefill, mix, 32 * _BATCH),
                "unmerged": functools.partial(engines[False].prefill, mix, 32 * _BATCH),
            }
            seconds = interleaved(prompts, 2 * setting.rounds + 1, warmup=1, clock=clock, limit_s=LIMIT_S)
            found["prefill"].append({name: median_ms(taken) for name, taken in seconds.items()})
            found["decode"].append(_decode_ms(engines, mix, 4 * setting.rounds, clock))
    return found


def _decode_ms(engines: Any, mix: Sequence[str], rounds: int, clock: Any) -> dict[str, float]:
    """Of the three modes in turn: the engine that merges runs one batch after the other."""
    ms = {}
    for name, merging, adapters in (("merged", True, ["a0"] * _BATCH), ("mixed", True, mix), ("unmerged", False, mix)):
        step = engines[merging].begin(adapters)
        seconds = interleaved({name: step}, rounds, warmup=4, clock=clock)
        ms[name] = median_ms(seconds[name])
        engines[merging].keep(0)
    return ms


def _mixture_panels(found: Found) -> list[Panel]:
    return [functools.partial(_draw_mixture, found, phase) for phase in ("prefill", "decode")]


def _draw_mixture(found: Found, phase: str, axis: Any) -> None:
    more = {name: [row[name] - row["merged"] for row in found[phase]] for name in ("mixed", "unmerged")}
    labels: dict[str, Any] = {"xlabel": "starving requests of other adapters", "ylabel": "ms more than all merged"}
    drawing.lines(more, found["starving"], title=f"{phase}, batch of {_BATCH}", **labels)(axis)
    axis.axvline(_BATCH / 2, color="#999", linestyle=":")


def _mixture_sums(found: Found) -> dict[str, tuple[float, float]]:
    """Milliseconds more than merged by phase, of mixed and of unmerged steps: sums over all cells in which fewer than
    half of the batch starve, because a single difference may be within the noise.
    """
    sums = {}
    for phase in ("prefill", "decode"):
        cells = [row for count, row in zip(found["starving"], found[phase], strict=True) if count < _BATCH / 2]
        mixed, unmerged = (sum(row[name] - row["merged"] for row in cells) for name in ("mixed", "unmerged"))
        sums[phase] = mixed, unmerged
    return sums


def _mixture_here(found: Found) -> dict[str, float | None]:
    return {
        f"saved below half of the batch, {phase}": 100 * (1 - mixed / unmerged) if unmerged >= _LEAST_MS else None
        for phase, (mixed, unmerged) in _mixture_sums(found).items()
    }


def _mixture_goals(found: Found) -> list[Goal]:
    """The share that is saved; for a phase without extra time, that it has none, which does not hold."""
    here = _mixture_here(found)
    goals = []
    for phase, (_, unmerged) in _mixture_sums(found).items():
        saved = here[f"saved below half of the batch, {phase}"]
        if saved is None:
            goals.append(Goal(f"fig20: ms more of unmerged than of merged steps, {phase}", unmerged, _LEAST_MS, False))
        else:
            goals.append(Goal(f"fig20: % of the extra time saved by the mixed mode, {phase}", saved, 0.0, False))
    return goals


# -- Table 2 ----------------------------------------------------------------------------------------------------------

_TABLE_2 = {
    "Qwen-VL-7B": (18, 32, 4096, 1.9),
    "LLaVA1.5-7B": (13, 32, 4096, 0.3),
    "LLaVA-1.5-13B": (24, 40, 5120, 0.3),
}


def _measure_models(_: Measuring) -> dict[str, Any]:
    """Sizes of the models that the benchmarks measure, from their configurations."""
    rows = {}
    for model in (QUICK_MODEL, *MODELS.values()):
        built = dummy_model(model.config(), "bfloat16", torch.device("meta"), seed=0)
        text = built.config.text_config  # type: ignore[attr-defined]
        vision = [p.numel() for name, p in built.named_parameters() if "visual" in name or "vision" in name]
        rows[model.name] = [
            sum(p.nbytes for p in built.parameters()) / 2**30,
            text.num_hidden_layers,
            text.hidden_size,
            sum(vision) / 1e9,
        ]
    return {"models": rows}


def _model_panels(found: Found) -> list[Panel]:
    return [functools.partial(_draw_models, found["models"])]


def _draw_models(models: Mapping[str, Sequence[float]], axis: Any) -> None:
    axis.axis("off")
    rows = [[name, "the paper", *map(str, row)] for name, row in _TABLE_2.items()]
    rows += [
        [name, "here", f"{size:.1f}", str(layers), str(width), f"{vision:.2f}"]
        for name, (size, layers, width, vision) in models.items()
    ]
    labels = ["model", "where", "GB (here GiB, bfloat16)", "layers", "dimension", "vision encoder, 10^9"]
    table = axis.table(
        rows, colLabels=labels, loc="center", cellLoc="left", colWidths=[0.24, 0.12, 0.22, 0.1, 0.12, 0.2]
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.5)
    for (line, _), cell in table.get_celld().items():
        cell.set_edgecolor("#ccc")
        if line and rows[line - 1][1] == "the paper":
            cell.set_facecolor("#fbeedd")


CODE = {
    "v-lora:fig7": Code(_measure_slots, _slot_panels, _switch_here, _switch_goals),
    "v-lora:fig16": Code(_measure_heads, _head_panels, _heads_here, _head_goals),
    "v-lora:fig20": Code(_measure_mixture, _mixture_panels, _mixture_here, _mixture_goals),
    "v-lora:table2": Code(_measure_models, _model_panels),
}
