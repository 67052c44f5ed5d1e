"""Figures of adapters on several ranks: S-LoRA's figure 8, BD-LoRA's figure 1 and its throughput grids."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.adapters import BD
from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measuring import Measuring
from vlora.bench import tp
from vlora.bench.harness import measured
from vlora.bench.plots import COLORS, ticks

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
    report = measured(tp.BENCH, quick, latencies_us=() if on_gpus else (0, 200))
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


def _grid_panels(found: Found) -> list[Panel]:
    latencies = sorted({row["latency us"] for row in found["rows"]})
    panels: list[Panel] = []
    for batch, column in ((1, 2), (64, 3)):
        panels.append(functools.partial(_draw_paper_grid, batch, column))
        panels += [functools.partial(_draw_grid, found["rows"], batch, latency) for latency in latencies]
    return panels


def _draw_paper_grid(batch: int, column: int, axis: Any) -> None:
    for place, (kind, label) in enumerate(_KINDS.items()):
        known = [(row[1], row[column]) for row in _PAPER_GRID[kind]]
        axis.plot(*zip(*known, strict=True), "o-", color=COLORS[place], label=label, markersize=4)
    axis.set_title(f"the paper, eight A100: batch {batch}", fontsize=9)
    _finish_grid(axis, "million parameters (8B model)")
    if batch == 1:
        axis.legend(fontsize=7)


def _draw_grid(rows: Rows, batch: int, latency: int, axis: Any) -> None:
    ranks = [row["rank"] for row in _of(rows, "decode", batch, latency)]
    for place, kind in enumerate(_KINDS):
        rates = _tokens_per_s(rows, kind, batch, latency)
        axis.plot(ranks, rates, "o-", color=COLORS[place], markersize=4)
    delay = f"+{latency} µs a collective" if latency else "no delay added"
    axis.set_title(f"here, {delay}: batch {batch}", fontsize=9)
    ticks(axis, ranks)
    _finish_grid(axis, "rank of a dense adapter with as many parameters")


def _finish_grid(axis: Any, xlabel: str) -> None:
    axis.set_xlabel(xlabel, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("tokens/s of a request", fontsize=8)
    axis.grid(alpha=0.3)


def _grid_here(found: Found) -> dict[str, float | None]:
    """Without an added delay."""
    rows = found["rows"]
    here: dict[str, float | None] = {}
    for name, kind in (("S-LoRA", "slora"), ("NFS-LoRA", "replicated")):
        for batch in (1, 64):
            own, other = (_tokens_per_s(rows, each, batch, 0)[-1] for each in ("bd", kind))
            here[f"BD-LoRA / {name}, rank 256, batch {batch}"] = own / other
    return here


# -- BD-LoRA, figure 1 ------------------------------------------------------------------------------------------------


def _measure_trade_off(measuring: Measuring) -> dict[str, Any]:
    quick = measuring.setting.quick
    parity = measuring.once("block-diagonal-accuracy", lambda: _accuracy(quick))
    return {"accuracy": parity, **_shared(measuring)}


def _accuracy(quick: bool) -> list[dict[str, Any]]:
    """Mean test accuracy of LoRA and of adapters in blocks with as many parameters, on the embedded model."""
    rows = measured(BD, quick, seeds=1).rows
    return [{name: row[name] for name in ("method", "rank", "parameters", "mean")} for row in rows]


def _trade_panels(found: Found) -> list[Panel]:
    return [functools.partial(_draw_trade_off, found)]


def _draw_trade_off(found: Found, axis: Any) -> None:
    rows, accuracy = found["rows"], found["accuracy"]
    for place, kind in enumerate(("slora", "bd")):
        seconds = [_ANSWER / rate for rate in _tokens_per_s(rows, kind, 1, 0)]
        score = 100 * accuracy[place]["mean"]
        color, marker = COLORS[1 + place], "os"[place]
        axis.plot(seconds, [score] * len(seconds), marker, color=color, label=_KINDS[kind])
        for x, row in zip(seconds, _of(rows, "decode", 1, 0), strict=True):
            offset = (0, -14 - 10 * (row["rank"] == 64) if place else 7)
            text = str(row["rank"])
            axis.annotate(
                text, (x, score), textcoords="offset points", xytext=offset, fontsize=7, color=color, ha="center"
            )
    axis.set(xlabel="seconds of a request", ylabel="mean test accuracy, %", ylim=(0, 100))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


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


def _communication_panels(found: Found) -> list[Panel]:
    panels = []
    for batch in (1, 64):
        shown = _of(found["rows"], "decode", batch, 0)
        rates = {
            "base model": [1.0 for _ in shown],
            "without its communication (block-diagonal)": [row["bd / base"] for row in shown],
            "S-LoRA's split": [row["slora / base"] for row in shown],
        }
        series = {
            name: [1e3 * batch / (row["base ms"] * ratio) for row, ratio in zip(shown, ratios, strict=True)]
            for name, ratios in rates.items()
        }
        highest = max(max(values) for values in series.values())
        panels.append(
            drawing.bars(
                [f"rank {row['rank']}" for row in shown],
                series,
                legend={"fontsize": 7, "loc": "upper right"},
                title=f"decode, batch {batch}",
                ylabel="tokens/s",
                ylim=(0, 1.4 * highest),
            )
        )
    return panels


def _communication_here(found: Found) -> dict[str, float | None]:
    shown = _of(found["rows"], "decode", 64, 0)
    return {"split / without communication": statistics.fmean(row["bd / base"] / row["slora / base"] for row in shown)}


CODE = {
    "s-lora:fig8": Code(_shared, _communication_panels, _communication_here),
    "bd-lora:fig1": Code(_measure_trade_off, _trade_panels, _trade_here),
    "bd-lora:fig10": Code(_shared, _grid_panels, _grid_here),
}
