"""Figures of adapters on several ranks: S-LoRA's figure 8, BD-LoRA's figure 1 and its throughput grids."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from fusion.bench import compare
from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.measuring import Measuring
from vlora.bench.tensor_parallel import tp

_KINDS = {"replicated": "replicated (NFS-LoRA)", "slora": "split (S-LoRA)", "bd": "block-diagonal (BD-LoRA)"}
_ANSWER = 128  # tokens, as in BD-LoRA's figure 10
# Of Llama-3.1-8B on eight A100 (tables 9, 10): rank, millions of parameters, tokens per second with 1 and 64 requests.
_PAPER_GRID = {
    "replicated": (
        (16, 41.9, 132.9, 26.3),
        (32, 83.9, 125.7, 24.3),
        (64, 167.8, 122.7, 19.6),
        (128, 335.5, 112.6, 13.5),
        (256, 671.1, 95.1, 8.5),
    ),
    "slora": (
        (16, 41.9, 103.5, 22.7),
        (32, 83.9, 102.3, 22.3),
        (64, 167.8, 100.2, 20.3),
        (128, 335.5, 96.5, 16.7),
        (256, 671.1, 86.6, 11.4),
    ),
    "bd": (
        (32, 36.2, 131.7, 28.8),
        (64, 72.4, 131.7, 27.9),
        (128, 144.7, 130.6, 27.3),
        (256, 289.4, 130.4, 23.7),
        (512, 578.8, 121.5, 16.3),
    ),
}
Rows = Sequence[dict[str, Any]]


def _shared(measuring: Measuring) -> dict[str, Any]:
    found: dict[str, Any] = measuring.once("tensor-parallel", lambda: _measure(measuring.setting.quick))
    return found


def _measure(quick: bool) -> dict[str, Any]:
    """Decode steps and prefills of two ranks, with and without a slow network between them."""
    on_gpus = torch.cuda.device_count() > 1
    report = tp.run(quick, () if on_gpus else (0, 200))
    return {"rows": [dict(row) for row in report.rows], "model": report.found["model"]}


def _of(rows: Rows, phase: str, batch: int, latency: int) -> Rows:
    return [row for row in rows if (row["phase"], row["batch"], row["latency us"]) == (phase, batch, latency)]


def _tokens_per_s(rows: Rows, kind: str, batch: int, latency: int) -> list[float]:
    """Per request, as in the paper: answers of 128 tokens; a prefill of each request, one after the other."""
    rates = []
    for decode, prefill in zip(_of(rows, "decode", batch, latency), _of(rows, "prefill", 1, latency), strict=True):
        decode_ms, prefill_ms = (row["base ms"] * row[f"{kind} / base"] for row in (decode, prefill))
        rates.append(1e3 * _ANSWER / (batch * prefill_ms + _ANSWER * decode_ms))
    return rates


# -- BD-LoRA's grids --------------------------------------------------------------------------------------------------


def _draw_grid(found: Found, canvas: Any) -> None:
    rows = found["rows"]
    latencies = sorted({row["latency us"] for row in rows})
    grid = canvas.subplots(2, 1 + len(latencies))
    for line, (batch, column) in enumerate(((1, 2), (64, 3))):
        for place, (kind, label) in enumerate(_KINDS.items()):
            known = [(row[1], row[column]) for row in _PAPER_GRID[kind]]
            grid[line][0].plot(*zip(*known, strict=True), "o-", color=drawing.LINES[place], label=label, markersize=4)
        grid[line][0].set_title(f"the paper, eight A100: batch {batch}", fontsize=9)
        grid[line][0].set_xlabel("million parameters (8B model)", fontsize=8)
        for axis, latency in zip(grid[line][1:], latencies, strict=True):
            ranks = [row["rank"] for row in _of(rows, "decode", batch, latency)]
            for place, (kind, label) in enumerate(_KINDS.items()):
                rates = _tokens_per_s(rows, kind, batch, latency)
                axis.plot(ranks, rates, "o-", color=drawing.LINES[place], label=label, markersize=4)
            delay = f"+{latency} µs a collective" if latency else "no delay added"
            axis.set_title(f"here, {delay}: batch {batch}", fontsize=9)
            axis.set_xlabel("rank of a dense adapter with as many parameters", fontsize=8)
            drawing.ticks(axis, ranks)
        for axis in grid[line]:
            axis.set_ylim(bottom=0)
            axis.set_ylabel("tokens/s of a request", fontsize=8)
            axis.grid(alpha=0.3)
    grid[0][0].legend(fontsize=7)


_GRID_FACTS = (
    Fact("BD-LoRA / S-LoRA, rank 256, batch 1", 121.5 / 86.6, "x", "Table 10: 121.5 (0.86x parameters) and 86.6 tok/s"),
    Fact(
        "BD-LoRA / NFS-LoRA, rank 256, batch 1", 121.5 / 95.1, "x", "Table 9: 121.5 (0.86x parameters) and 95.1 tok/s"
    ),
    Fact("BD-LoRA / S-LoRA, rank 256, batch 64", 16.3 / 11.4, "x", "Table 10: 16.3 (0.86x parameters) and 11.4 tok/s"),
    Fact("BD-LoRA / NFS-LoRA, rank 256, batch 64", 16.3 / 8.5, "x", "Table 9: 16.3 (0.86x parameters) and 8.5 tok/s"),
)


def _grid_here(found: Found) -> dict[str, float | None]:
    """Without an added delay."""
    rows = found["rows"]
    rates = {(kind, batch): _tokens_per_s(rows, kind, batch, 0)[-1] for kind in _KINDS for batch in (1, 64)}
    return {
        "BD-LoRA / S-LoRA, rank 256, batch 1": rates["bd", 1] / rates["slora", 1],
        "BD-LoRA / NFS-LoRA, rank 256, batch 1": rates["bd", 1] / rates["replicated", 1],
        "BD-LoRA / S-LoRA, rank 256, batch 64": rates["bd", 64] / rates["slora", 64],
        "BD-LoRA / NFS-LoRA, rank 256, batch 64": rates["bd", 64] / rates["replicated", 64],
    }


# -- BD-LoRA, figure 1 ------------------------------------------------------------------------------------------------


def _measure_trade_off(measuring: Measuring) -> dict[str, Any]:
    quick = measuring.setting.quick
    parity = measuring.once("block-diagonal-accuracy", lambda: _accuracy(quick))
    return {"accuracy": parity, **_shared(measuring)}


def _accuracy(quick: bool) -> list[dict[str, Any]]:
    """Mean test accuracy of LoRA and of adapters in blocks with as many parameters, on the embedded model."""
    found = compare(quick, None, lambda _: None, 1)
    return [{name: row[name] for name in ("method", "rank", "parameters", "mean")} for row in found.rows]


def _draw_trade_off(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    rows, accuracy = found["rows"], found["accuracy"]
    scores = {"slora": accuracy[0]["mean"], "bd": accuracy[1]["mean"]}
    for place, kind in enumerate(scores):
        rates = _tokens_per_s(rows, kind, 1, 0)
        seconds = [_ANSWER / rate for rate in rates]
        score = 100 * scores[kind]
        color, marker = drawing.LINES[1 + place], "os"[place]
        left.plot(seconds, [score] * len(seconds), marker, color=color, label=_KINDS[kind])
        for x, row in zip(seconds, _of(rows, "decode", 1, 0), strict=True):
            offset = (0, -14 - 10 * (row["rank"] == 64) if place else 7)
            text = str(row["rank"])
            left.annotate(
                text, (x, score), textcoords="offset points", xytext=offset, fontsize=7, color=color, ha="center"
            )
    left.set(xlabel="seconds of a request", ylabel="mean test accuracy, %")
    left.set_ylim(0, 100)
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    drawing.beside(right, _TRADE_FACTS, _trade_here(found), ylabel="x")


_TRADE_FACTS = tuple(
    Fact(
        f"end-to-end speed-up over S-LoRA, {end}",
        value,
        "x",
        "introduction: 1.27x-1.51x for Llama-3.1-8B on eight A100",
    )
    for end, value in (("least", 1.27), ("most", 1.51))
)


def _trade_here(found: Found) -> dict[str, float | None]:
    """Without an added delay."""
    rows = found["rows"]
    pairs = zip(_tokens_per_s(rows, "bd", 1, 0), _tokens_per_s(rows, "slora", 1, 0), strict=True)
    ratios = [bd / slora for bd, slora in pairs]
    return {
        "end-to-end speed-up over S-LoRA, least": min(ratios),
        "end-to-end speed-up over S-LoRA, most": max(ratios),
    }


# -- S-LoRA, figure 8 -------------------------------------------------------------------------------------------------


def _draw_communication(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    rows = found["rows"]
    for axis, batch in ((left, 1), (right, 64)):
        shown = _of(rows, "decode", batch, 0)
        series = {
            "base model": [1e3 * batch / row["base ms"] for row in shown],
            "without its communication (block-diagonal)": [
                1e3 * batch / (row["base ms"] * row["bd / base"]) for row in shown
            ],
            "S-LoRA's split": [1e3 * batch / (row["base ms"] * row["slora / base"]) for row in shown],
        }
        groups = [f"rank {row['rank']}" for row in shown]
        drawing.bars(axis, groups, series, title=f"decode, batch {batch}", ylabel="tokens/s")
        axis.margins(y=0.4)
        axis.legend(fontsize=7, loc="upper right")


def _communication_here(found: Found) -> dict[str, float | None]:
    shown = _of(found["rows"], "decode", 64, 0)
    return {"split / without communication": statistics.fmean(row["bd / base"] / row["slora / base"] for row in shown)}


_LAYERS = "layers of random bfloat16 values"
_RANKS = (
    "Two ranks of one thread on one machine, or all GPUs if there are several (4 layers of hidden size 1024), wall "
    "time; the numbers beside the paper's are without an added delay."
)

FIGURES: Sequence[Figure] = (
    Figure(
        paper="s-lora",
        number="fig8",
        title="throughput with tensor parallelism",
        states="The disparity between S-LoRA with and without its communication is small; 2 to 4 GPUs more than double "
        "the throughput (no numbers in the text).",
        caption=f"{_RANKS} Without communication: a block-diagonal adapter with as many parameters. More ranks than "
        "cores "
        "are not measured.",
        model=_LAYERS,
        runs_on="ranks",
        measure=_shared,
        draw=_draw_communication,
        here=_communication_here,
        size=(12.0, 4.4),
    ),
    Figure(
        paper="bd-lora",
        number="fig1",
        title="accuracy against the time of a request",
        states="For a certain downstream performance, BD-LoRA is 1.27 to 1.51 times as fast as S-LoRA (Llama-3.1-8B).",
        caption=f"{_RANKS} Numbers in the plot: ranks of a dense adapter with as many parameters. Accuracy: one seed "
        "of `vlora bench bd` (digits, photos, signs) at one rank each, on the embedded model and one CPU thread; "
        "with --quick it is trained for few steps and says nothing.",
        model=_LAYERS,
        runs_on="ranks",
        measure=_measure_trade_off,
        draw=_draw_trade_off,
        facts=_TRADE_FACTS,
        here=_trade_here,
        size=(11.0, 4.4),
    ),
    Figure(
        paper="bd-lora",
        number="fig10",
        title="throughput by adapter size, batch 1 and 64 (also tables 9 and 10)",
        states="BD-LoRA has the highest throughput in almost all settings, most at large ranks and batches.",
        caption=f"{_RANKS} A delay in a plot's title is added to every collective, as of a slower network. "
        "Prompts of 256 tokens instead of 1,024, answers of 128. The paper's values are those of its tables.",
        model=_LAYERS,
        runs_on="ranks",
        measure=_shared,
        draw=_draw_grid,
        facts=_GRID_FACTS,
        here=_grid_here,
        size=(13.0, 6.4),
    ),
)
