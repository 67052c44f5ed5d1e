"""The operator against the ways others add many adapters' deltas, layer by layer.

Whole layers are timed, base product and deltas, except against the two plain baselines, whose deltas alone are
compared. Every cell meets its factors as a model's layer does: the base weights have passed through the caches in
between.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import atmm
from atmm.selection import choose
from atmm.strategies import comes_transposed
from atmm.survey import Survey
from vlora.bench.form import Goal, Report

_SHAPES = ((896, 4864), (2048, 8192))
_RANKS = (8, 16, 64)
_TOKENS = (1, 4, 16, 64, 256, 2048)
_ADAPTERS = (1, 4, 16)
_DTYPES = (torch.bfloat16, torch.float32)
_CACHE_BYTES = 24 * 2**20  # read between two timings, to drive everything else out of a core's own caches
_MOST_GATHERED_BYTES = 2**30  # what gathering factors per token may take; larger cells go without that baseline


class _Cell(NamedTuple):
    d_in: int
    d_out: int
    rank: int
    lengths: tuple[int, ...]
    even: bool
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def run(quick: bool) -> Report:
    """On a GPU where there is one (`vlora.bench.atmm_gpu`), else one thread of a CPU. quick: the smaller shape, one
    rank, few batches."""
    if torch.cuda.is_available():
        from vlora.bench import atmm_gpu  # needs Triton

        return atmm_gpu.run(quick)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    atmm.load_kernels()
    rounds = 5 if quick else 9
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for cell in _cells(quick):
            rows.append(_measure(cell, rounds))
    return Report("atmm", rows, _goals(rows))


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """latency.png and chosen.png."""
    from vlora.bench import atmm_plots  # matplotlib is an extra

    atmm_plots.draw(rows, folder)


def _cells(quick: bool) -> list[_Cell]:
    cells = []
    for (d_in, d_out), rank, num_tokens, num_adapters, dtype in itertools.product(
        _SHAPES[:1] if quick else _SHAPES,
        _RANKS[1:2] if quick else _RANKS,
        (4, 64, 256) if quick else _TOKENS,
        (4,) if quick else _ADAPTERS,
        _DTYPES,
    ):
        if num_adapters > num_tokens or (d_in > 1000 and num_tokens > 256):
            continue
        cells.append(_Cell(d_in, d_out, rank, _even(num_tokens, num_adapters), True, dtype))
        if 1 < num_adapters < num_tokens:
            cells.append(_Cell(d_in, d_out, rank, _uneven(num_tokens, num_adapters), False, dtype))
    return cells


def _even(num_tokens: int, num_adapters: int) -> tuple[int, ...]:
    return tuple(
        (place + 1) * num_tokens // num_adapters - place * num_tokens // num_adapters for place in range(num_adapters)
    )


def _uneven(num_tokens: int, num_adapters: int) -> tuple[int, ...]:
    """Each about half of the one before, as [100, 50, ..., 1]."""
    spare = num_tokens - num_adapters
    lengths = []
    for place in range(num_adapters):
        extra = spare if place == num_adapters - 1 else (spare + 1) // 2
        lengths.append(1 + extra)
        spare -= extra
    return tuple(lengths)


def _measure(cell: _Cell, rounds: int) -> dict[str, Any]:
    keys = [f"a{place}" for place in range(len(cell.lengths))]
    site = atmm.Site("layer", cell.d_in, cell.d_out)
    for key in keys:
        a = (torch.randn(cell.rank, cell.d_in) * 0.05).to(cell.dtype)
        bt = (torch.randn(cell.rank, cell.d_out) * 0.05).to(cell.dtype)
        site.factors[key] = atmm.Factors(a, bt)
    group = atmm.SiteGroup([site])
    group.pack(keys)
    starts = [0, *itertools.accumulate(cell.lengths)]
    lanes = [atmm.Lane(key, *span) for key, span in zip(keys, itertools.pairwise(starts), strict=True)]
    x = torch.randn(cell.num_tokens, cell.d_in).to(cell.dtype)
    rows = torch.zeros(cell.num_tokens, cell.d_out, dtype=cell.dtype)
    ours = torch.zeros(cell.d_out, cell.num_tokens, dtype=cell.dtype).t() if comes_transposed(x) else rows.clone()
    names = [name for name in atmm.STRATEGIES if name != "tiled"]
    plans = {name: atmm.SegmentPlan(cell.num_tokens, lanes, name) for name in names}
    assert group.packed is not None
    chosen = choose(Survey(atmm.SegmentPlan(cell.num_tokens, lanes), group.packed.layout), comes_transposed(x))
    calls: dict[str, Callable[[], object]] = {
        **{name: functools.partial(atmm.add_delta, ours, x, site, plan) for name, plan in plans.items()},
        "padded einsum": _padded_einsum(site, keys, cell.lengths, x, rows),
        "PEFT layer": _peft_layer(site, keys, cell, x),
        "plain loop": lambda: _plain_loop(site, lanes, x, rows),
    }
    if cell.num_tokens * cell.rank * (cell.d_in + cell.d_out) * x.element_size() <= _MOST_GATHERED_BYTES:
        calls["gather and bmm"] = _gather_bmm(site, keys, cell.lengths, x, rows)
    seconds = _timed(calls, rounds)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    # Strategies are told apart by their least times: what a neighbour on the machine took is no part of a choice.
    least = {name: min(seconds[name]) for name in names}
    best = min(names, key=least.__getitem__)
    table: dict[str, Any] = {
        "layer": f"{cell.d_in}x{cell.d_out}",
        "rank": cell.rank,
        "tokens": cell.num_tokens,
        "adapters": len(keys),
        "segments": "even" if cell.even else "uneven",
        "dtype": str(cell.dtype).removeprefix("torch."),
        "us": median[chosen] * 1e6,
        "chosen": chosen,
        "best": best,
        "chosen / best": least[chosen] / least[best],
        "p95 / p50": _spread(seconds[chosen]),
    }
    for name in ("gather and bmm", "padded einsum", "plain loop", "PEFT layer"):
        table[name] = median[name] / median[chosen] if name in median else None
    return table


def _timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    others = torch.ones(_CACHE_BYTES // 4)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            others.sum()
            started = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _spread(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)] / statistics.median(ordered)


def _gather_bmm(
    site: atmm.Site, keys: Sequence[str], lengths: Sequence[int], x: Tensor, y: Tensor
) -> Callable[[], object]:
    """Punica's Gather-BMM baseline: every token's factors gathered, then two batched products."""
    a = torch.stack([site.factors[key].a for key in keys])
    bt = torch.stack([site.factors[key].bt for key in keys])
    owner = torch.repeat_interleave(torch.arange(len(keys)), torch.tensor(lengths))

    def call() -> Tensor:
        hidden = torch.bmm(a[owner], x[:, :, None])
        return y.add_(torch.bmm(hidden.transpose(1, 2), bt[owner])[:, 0])

    return call


def _padded_einsum(
    site: atmm.Site, keys: Sequence[str], lengths: Sequence[int], x: Tensor, y: Tensor
) -> Callable[[], object]:
    """dLoRA's way: segments padded to the longest, one einsum per factor."""
    a = torch.stack([site.factors[key].a for key in keys])
    bt = torch.stack([site.factors[key].bt for key in keys])
    longest = max(lengths)
    rows = torch.cat([torch.arange(length) + place * longest for place, length in enumerate(lengths)])

    def call() -> Tensor:
        padded = x.new_zeros(len(keys) * longest, x.shape[1])
        padded[rows] = x
        hidden = torch.einsum("stk,srk->str", padded.view(len(keys), longest, -1), a)
        return y.add_(torch.einsum("str,srn->stn", hidden, bt).flatten(0, 1)[rows])

    return call


def _plain_loop(site: atmm.Site, lanes: Sequence[atmm.Lane], x: Tensor, y: Tensor) -> None:
    """Adapter by adapter, as one would write it first."""
    for key, start, stop, _ in lanes:
        a, bt = site.factors[key]
        y[start:stop] += F.linear(x[start:stop], a) @ bt


def _peft_layer(site: atmm.Site, keys: Sequence[str], cell: _Cell, x: Tensor) -> Callable[[], object]:
    """PEFT's mixed-batch layer, one name per row, without its base product: that is timed and taken off."""
    model = nn.Sequential(nn.Linear(cell.d_in, cell.d_out, bias=False)).to(cell.dtype)
    peft: Any = None
    for key in keys:
        config = LoraConfig(r=cell.rank, lora_alpha=cell.rank, target_modules=["0"], init_lora_weights=False)
        if peft is None:
            peft = get_peft_model(model, config, adapter_name=key)  # type: ignore[arg-type]
        else:
            peft.add_adapter(key, config)
    layer = peft.to(cell.dtype).eval().base_model.model[0]
    # Deltas alone: the base layer answers at once, with zeros.
    zeros = torch.zeros(cell.num_tokens, cell.d_out, dtype=cell.dtype)
    layer.base_layer.forward = lambda x, *_, **__: zeros
    names = [key for key, length in zip(keys, cell.lengths, strict=True) for _ in range(length)]
    return lambda: layer(x, adapter_names=names)


def _goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    def ratios(name: str, **wanted: Any) -> list[float]:
        return [row[name] for row in rows if row[name] and all(row[key] == value for key, value in wanted.items())]

    small = [
        row["plain loop"] for row in rows if row["dtype"] == "bfloat16" and row["tokens"] <= 64 and row["adapters"] >= 4
    ]
    several = [row["PEFT layer"] for row in rows if row["adapters"] > 1]
    einsum_elsewhere = ratios("padded einsum", segments="even")
    return [
        Goal("chosen / best single strategy, worst cell", max(ratios("chosen / best")), 1.1, True),
        Goal("gather and bmm / chosen, geometric mean", _mean(ratios("gather and bmm")), 8.0, False),
        Goal(
            "padded einsum / chosen, uneven, geometric mean",
            _mean(ratios("padded einsum", segments="uneven")),
            2.0,
            False,
        ),
        Goal("padded einsum / chosen, even, worst cell", min(einsum_elsewhere), 1.0, False),
        Goal("plain loop / chosen, bfloat16, up to 64 tokens, 4 adapters or more", _mean(small), 1.8, False),
        Goal("PEFT layer / chosen, geometric mean", _mean(several), 2.5, False),
    ]


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
