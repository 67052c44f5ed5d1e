"""Symbiosis' figures of memory, batching, and inference beside training: parts of `vlora bench split`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.measuring import Measuring
from vlora.bench.report import Goal
from vlora.bench.split import mixed, plots, split
from vlora.bench.split.plots import FITTING_CLIENTS, FITTING_COPIES, TABLE_5, TOKEN_S
from vlora.bench.split.rows import FULL, QUICK, Size

_SIZE = FULL._replace(clients=(1, 4, 8), rounds=5, mix=FULL.mix._replace(rounds=2))
"""Fewer numbers of clients and rounds than in the bench, so that all figures together take less than two hours."""


def _size(quick: bool) -> Size:
    return QUICK if quick else _SIZE


def _measure(part: str, measuring: Measuring) -> dict[str, Any]:
    """The rows of a part of `vlora bench split`; figures share them."""
    rows = measuring.once(f"split-{part}", lambda: split.one(part, _size(measuring.setting.quick)))
    return {"rows": rows}


def _part(part: str) -> Callable[[Measuring], dict[str, Any]]:
    return functools.partial(_measure, part)


def _ways(found: Found, what: str) -> Mapping[str, Mapping[str, Any]]:
    return {row["way"]: row for row in found["rows"] if row["what"].startswith(what)}


def _goals(found: Found) -> Sequence[Goal]:
    return split.goals_of(found["rows"])


# -- memory: figures 9 and 10 -----------------------------------------------------------------------------------------


def _draw_peaks(found: Found, canvas: Any) -> None:
    (axis,) = drawing.panels(canvas, 1)
    ways = _ways(found, "peak")
    series = {
        "client": [row["clients MiB"] for row in ways.values()],
        "executor": [row["executor MiB"] for row in ways.values()],
    }
    groups = ["own copy (plain PEFT)", "one client and its executor"]
    drawing.bars(axis, groups, series, ylabel="MiB beside the weights, at the peak")


_FITTING = "trainings in the memory of copies, of the copies"


def _draw_memory(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2, (2.4, 1))
    plots.memory(left, found["rows"])
    drawing.beside(right, _MEMORY_FACTS, _memory_here(found))


_MEMORY_FACTS = (
    Fact(
        _FITTING,
        FITTING_CLIENTS / FITTING_COPIES,
        "x",
        f"section 4.1.2: {FITTING_CLIENTS} clients, or {FITTING_COPIES} independent trainings, fit on one GPU",
    ),
)


def _memory_here(found: Found) -> dict[str, float | None]:
    """Clients that fit in the memory of eight copies in bfloat16 that cannot be shared; none with fewer copies."""
    rows = [row for row in found["rows"] if row["what"] == "memory" and "bfloat16" in row["way"]]
    most = max(row["clients"] for row in rows)
    if most < _SIZE.clients[-1]:  # the executor's own process takes more than it saves
        return {_FITTING: None}
    (copies,) = (row["all MiB"] for row in rows if row["clients"] == most and row["executor MiB"] == 0)
    (through,) = (row for row in rows if row["clients"] == most and row["executor MiB"])
    fitting = math.floor((copies - through["executor MiB"]) / (through["clients MiB"] / most))
    return {_FITTING: max(0, fitting) / most}


# -- batching: table 5 ------------------------------------------------------------------------------------------------


def _draw_table_5(found: Found, canvas: Any) -> None:
    *axes, right = drawing.panels(canvas, 4, (1, 1, 1, 1.6))
    plots.table_5(axes, found["rows"])
    drawing.beside(right, _TABLE_FACTS, _table_here(found))


def _table_facts() -> tuple[Fact, ...]:
    none, lockstep, opportunistic = (TABLE_5[name] for name in ("no lockstep", "lockstep", "opportunistic"))
    return (
        Fact("latency to lockstep's", opportunistic.latency_s / lockstep.latency_s, "x", "Table 5: 0.77 and 1.6 s"),
        Fact("latency to no lockstep's", opportunistic.latency_s / none.latency_s, "x", "Table 5: 0.77 and 1.02 s"),
        Fact(
            "throughput to lockstep's",
            opportunistic.tokens_per_s / lockstep.tokens_per_s,
            "x",
            "Table 5: 103 and 88 tokens/s",
        ),
        Fact(
            "throughput to no lockstep's",
            opportunistic.tokens_per_s / none.tokens_per_s,
            "x",
            "Table 5: 103 and 94 tokens/s",
        ),
        Fact("calls a product", opportunistic.calls / none.calls, "x", "Table 5: average batch sizes 3.7 and 1"),
    )


_TABLE_FACTS = _table_facts()


def _table_here(found: Found) -> dict[str, float | None]:
    ways = _ways(found, "table 5")
    none, lockstep, opportunistic = (ways[name] for name in ("no lockstep", "lockstep", "opportunistic"))
    return {
        "latency to lockstep's": opportunistic["latency ms"] / lockstep["latency ms"],
        "latency to no lockstep's": opportunistic["latency ms"] / none["latency ms"],
        "throughput to lockstep's": opportunistic["tokens a second"] / lockstep["tokens a second"],
        "throughput to no lockstep's": opportunistic["tokens a second"] / none["tokens a second"],
        "calls a product": opportunistic["calls a product"] / none["calls a product"],
    }


# -- inference and training: figures 22 and 23 ------------------------------------------------------------------------


def _draw_inference(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2, (2.4, 1))
    plots.throughput(left, found["rows"], mixed.ALL)
    row = _ways(found, mixed.WHAT)[mixed.ALL]
    drawing.bars(
        right,
        ["a client in prefill", "generation only"],
        {"inference": [row["prefill"], row["generation"]]},
        ylabel="tokens a second",
        title="phases",
    )


def _inference_goals(found: Found) -> Sequence[Goal]:
    row = _ways(found, mixed.WHAT)[mixed.ALL]
    return [Goal("figure 22: tokens a second in prefill to generation", row["prefill"] / row["generation"], 1.0, False)]


_RATIO = "latency of a token, mixed to inference only"


def _draw_mix(found: Found, canvas: Any) -> None:
    left, middle, right = drawing.panels(canvas, 3, (2.2, 1.2, 1))
    plots.throughput(left, found["rows"], mixed.MIXED)
    plots.latency(middle, found["rows"])
    plots.tokens(right, found["rows"])


_MIX_FACTS = (Fact(_RATIO, 1.0, "x", f"section 4.4: the latency remains roughly the same at {TOKEN_S} s"),)


def _mix_here(found: Found) -> dict[str, float | None]:
    return {_RATIO: _ways(found, mixed.WHAT)[mixed.MIXED]["ratio"]}


_MODEL = "Qwen2-VL with layers of 15 million parameters, random weights"
_PROCESSES = "Executor and clients are processes of one thread each on this machine; the paper has GPUs for each."

FIGURES: Sequence[Figure] = (
    Figure(
        paper="symbiosis",
        number="fig9",
        title="memory of one training beside the weights",
        states="With the backward pass that stores nothing, the executor's memory is much smaller; without it, more is "
        "needed than by the baseline (no numbers in the text).",
        caption="Private memory during steps of 512 tokens, LoRA of rank 8. PEFT's frozen linear layers store no "
        f"inputs either, so there is nothing to save here. {_PROCESSES}",
        model=f"{_MODEL}, float32",
        runs_on="processes",
        measure=_part("peaks"),
        draw=_draw_peaks,
        size=(8.0, 4.0),
    ),
    Figure(
        paper="symbiosis",
        number="fig10",
        title="memory by trainings",
        states="The executor's memory is constant, that of clients grows linearly; 5 clients and the base fit on a GPU "
        "that holds 2 independent trainings.",
        caption="PSS of all processes after a step of 128 tokens of each. The paper's ratio beside that of copies in "
        "bfloat16 made from a float32 file, the only ones here that cannot share memory; most of a client's memory "
        "here is Python and torch, and the base is small. A quick run has no ratio: with fewer than "
        f"{_SIZE.clients[-1]} trainings, the executor's own process takes more memory than it saves.",
        model=_MODEL,
        runs_on="processes",
        measure=_part("memory"),
        draw=_draw_memory,
        facts=_MEMORY_FACTS,
        here=_memory_here,
        goals=_goals,
        size=(13.0, 4.6),
    ),
    Figure(
        paper="symbiosis",
        number="fig22",
        title="throughput of inference clients over time",
        states="Throughput in prefill is visibly higher; the GPU remains under-utilized in generation.",
        caption="Each client answers requests of two sequences, one after the other (the paper: prompts of 512 tokens, "
        f"here 64). {_PROCESSES}",
        model=f"{_MODEL}, float32",
        runs_on="processes",
        measure=_part("mixed"),
        draw=_draw_inference,
        goals=_inference_goals,
        size=(12.0, 4.4),
    ),
    Figure(
        paper="symbiosis",
        number="fig23",
        title="throughput of inference and training clients over time",
        states="Two of eight clients train instead: the throughput is higher, and the latency of a token remains "
        f"roughly the same at {TOKEN_S} s.",
        caption="As figure 22, with training in the place of a quarter of the clients, at a lower priority of the "
        "operating system, because all clients share the processors here. Whole calls: without the executor's pieces "
        f"and pauses of large calls. {_PROCESSES}",
        model=f"{_MODEL}, float32",
        runs_on="processes",
        measure=_part("mixed"),
        draw=_draw_mix,
        facts=_MIX_FACTS,
        here=_mix_here,
        goals=_goals,
        size=(15.0, 4.6),
    ),
    Figure(
        paper="symbiosis",
        number="table5",
        title="opportunistic batching against lockstep and no lockstep",
        states="Opportunistic batching has the lowest latency and the highest throughput.",
        caption="Clients that decode with different batch sizes; the ratios are opportunistic batching's, and calls a "
        f"product those to no lockstep's. The paper has batch sizes up to 256. {_PROCESSES}",
        model=f"{_MODEL}, float32",
        runs_on="processes",
        measure=_part("table5"),
        draw=_draw_table_5,
        facts=_TABLE_FACTS,
        here=_table_here,
        goals=_goals,
        size=(16.0, 4.6),
    ),
)
