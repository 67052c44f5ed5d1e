"""V-LoRA's figures of single steps: the switch of modes, task heads, the mixed mode; its table of models."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlora.bench.engine.heads import latency_rows
from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.measured.engine_steps import adapter_folders, engine_in_mode
from vlora.bench.paper.measured.machine_costs import switch_times
from vlora.bench.paper.measuring import BASELINE_TYPE, LIMIT_S, QUICK_MODEL, RANK, Measuring
from vlora.bench.report import Goal
from vlora.bench.scheduling.models import MODELS
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


def _draw_slots(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2, (1.4, 1))
    ms, switch = found["ms"], found["switch ms"]
    ways = {
        "this project": (switch["merge"], switch["back"]),
        "PEFT's merge_adapter\n(dLoRA's way)": (switch["PEFT merge"], switch["PEFT unmerge"]),
    }
    for line, (into, back) in enumerate(ways.values()):
        start = 0.0
        spans = (
            ("switch", into),
            ("merged, requests 1-3", ms["merged"]),
            ("switch", back),
            ("unmerged, 4-7", ms["unmerged"]),
        )
        for name, width in spans:
            color = {"switch": drawing.LINES[2], "merged, requests 1-3": drawing.LINES[0]}.get(name, drawing.LINES[1])
            left.barh(line, width, left=start, color=color, height=0.5, edgecolor="white")
            if name != "switch":
                left.text(
                    start + width / 2, line, f"{name}\n{width:.0f} ms", ha="center", va="center", fontsize=7, color="w"
                )
            start += width
        left.text(0, line - 0.32, f"merge {into:.1f} ms, back {back:.1f} ms (red)", fontsize=8, va="bottom")
    left.set_yticks(range(len(ways)), list(ways), fontsize=8)
    left.set(xlabel="ms", ylim=(1.6, -0.7), title="two slots, eight requests of 256 tokens")
    drawing.beside(right, _SWITCH_FACTS, _switch_here(found), ylabel="% of merged inference of three requests")


_SWITCH_FACTS = (
    Fact("dLoRA's switch", 64, "%", "caption of figure 7: 53 ms, 64 % of merged inference of three 256-token requests"),
    Fact("the swift switch", 100 * 10 / (53 / 0.64), "%", "4.4.1: less than 10 ms, relative to the same inference"),
)


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


def _draw_heads(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2, (1.4, 1))
    rows = found["rows"]
    cells = list(dict.fromkeys((row["tower"], row["batch"], row["frames"]) for row in rows))
    tokens = sorted({row["answer tokens"] for row in rows})

    def value(cell: tuple[str, int, int], answer: int, name: str) -> float:
        own = (row for row in rows if (row["tower"], row["batch"], row["frames"]) == cell)
        return float(next(row[name] for row in own if row["answer tokens"] == answer))

    series = {"task head": [value(cell, tokens[0], "head ms") for cell in cells]}
    series |= {f"words, {n} tokens": [value(cell, n, "words ms") for cell in cells] for n in tokens}
    labels = [f"{tower}\nbatch {batch}\n{frames} frame{'s' * (frames > 1)}" for tower, batch, frames in cells]
    drawing.bars(left, labels, series, ylabel="ms of a batch")
    drawing.beside(right, _HEAD_FACTS, _heads_here(found), ylabel="% lower latency with a head")


_HEAD_FACTS = tuple(
    Fact(f"reduction, {end}", value, "%", "6.3.1: 41-63 % less latency than the language modelling head")
    for end, value in (("least", 41), ("most", 63))
)


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


def _draw_mixture(found: Found, canvas: Any) -> None:
    left, middle, right = drawing.panels(canvas, 3)
    for axis, phase in ((left, "prefill"), (middle, "decode")):
        drawing.lines(
            axis,
            {name: [row[name] - row["merged"] for row in found[phase]] for name in ("mixed", "unmerged")},
            found["starving"],
            title=f"{phase}, batch of {_BATCH}",
            xlabel="starving requests of other adapters",
            ylabel="ms more than all merged",
        )
        axis.axvline(_BATCH / 2, color="#999", linestyle=":")
    drawing.beside(right, _MIXTURE_FACTS, _mixture_here(found), ylabel="% of the extra time saved")


_MIXTURE_FACTS = tuple(
    Fact(
        f"saved below half of the batch, {phase}",
        62,
        "%",
        "6.3.3: deLoRA saves on average 62 % of the computation overhead",
    )
    for phase in ("prefill", "decode")
)


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


def _draw_models(found: Found, canvas: Any) -> None:
    (axis,) = drawing.panels(canvas, 1)
    axis.axis("off")
    rows = [[name, "the paper", *map(str, row)] for name, row in _TABLE_2.items()]
    rows += [
        [name, "here", f"{size:.1f}", str(layers), str(width), f"{vision:.2f}"]
        for name, (size, layers, width, vision) in found["models"].items()
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


FIGURES: Sequence[Figure] = (
    Figure(
        paper="v-lora",
        number="fig7",
        minutes=3,
        title="the cost of a switch between modes",
        states="dLoRA's switch alone takes 53 ms, 64 % of merged inference of three 256-token requests; V-LoRA's takes "
        "less than 10 ms.",
        caption=f"Prefills of 256 tokens each, adapters of rank {RANK}; dLoRA's way is PEFT's merge_adapter: a product "
        f"and an addition per layer. {BASELINE_TYPE} Merging here is bound by reading and writing all weights once.",
        measure=_measure_slots,
        draw=_draw_slots,
        facts=_SWITCH_FACTS,
        here=_switch_here,
        goals=_switch_goals,
        size=(13.0, 4.2),
    ),
    Figure(
        paper="v-lora",
        number="fig16",
        minutes=8,
        title="task head against answers in words",
        states="A task head takes 41-63 % less time than the language modelling head.",
        caption="The 0.5 B model (8 of 24 layers with --quick) with its vision tower on frames of 64 tokens; the same "
        "prompt for both, though one for words may be longer. An answer of 5 tokens is figure 11's. Shapes larger than "
        f"one whose calls take {_HEADS_LIMIT_S:.0f} s together are left out.",
        model="the 0.5 B model or its first layers, random weights, bfloat16",
        runs_on="cpu",
        measure=_measure_heads,
        draw=_draw_heads,
        facts=_HEAD_FACTS,
        here=_heads_here,
        goals=_head_goals,
        size=(12.0, 4.4),
    ),
    Figure(
        paper="v-lora",
        number="fig20",
        minutes=12,
        title="latency gain of the mixed mode",
        states="The mixed mode saves on average 62 % of the extra computation of unmerged inference while fewer than "
        "half of the batch starve.",
        caption="Steps of the engine with sixteen requests, of which some are for other adapters than the merged one; "
        "in decoding the extra time is close to the noise of a step. The share is of the sums over all cells in which "
        "fewer than half of the batch starve.",
        measure=_measure_mixture,
        draw=_draw_mixture,
        facts=_MIXTURE_FACTS,
        here=_mixture_here,
        goals=_mixture_goals,
        size=(14.0, 4.4),
    ),
    Figure(
        paper="v-lora",
        number="table2",
        title="model configurations",
        states="Three LMMs of 13 to 24 GB with 32 or 40 layers.",
        caption="The models that the benchmarks here measure; sizes are computed from their configurations, weights "
        "are random. Those of 7 B and 13 B need a GPU.",
        runs_on="cpu",
        measure=_measure_models,
        draw=_draw_models,
        size=(10.0, 3.2),
    ),
)
