"""The operator on a GPU against other ways to tile the same work, group of layers by group of layers.

Only deltas are timed, as CUDA graphs over copies of a group that together exceed the cache, so that factors are read
from memory as in a model. Floors are bytes (factors once, inputs once, outputs twice) at the speed of a copy measured
in the same run.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import atmm
from atmm.batch_stats import BatchStats
from atmm.dispatch import choose
from atmm.tuning.replays import Replays
from atmm.tuning.search import Case, Shape
from benchmarks.kernel_baselines import STYLES, prepare_call
from benchmarks.plain_baselines import lane_factors, padded_einsum
from vlora.bench.gpu.stages.search import QWEN2_VL_7B
from vlora.bench.harness import Measured
from vlora.bench.report import Goal

MODELS = {
    "Qwen2-VL-7B": QWEN2_VL_7B,
    "LLaVA-1.5-7B": (
        Shape(4096, (4096, 4096, 4096)),
        Shape(4096, (4096,)),
        Shape(4096, (11008, 11008)),
        Shape(11008, (4096,)),
    ),
}
_RANKS = (16, 64)
_TOKENS = (1, 16, 64, 256, 1024, 4096)
_ADAPTERS = (1, 8, 32)
_NUM_LAYERS = 28
_CACHE_BYTES = 128 * 2**20  # more than the capacity of any L2 cache
MOST_COPIES = 8
_REPLAYS = 20


class _Timing(NamedTuple):
    """Seconds per group: median, and 95th percentile."""

    median: float
    high: float


def measure_all(quick: bool) -> Measured:
    """Time add-delta on a GPU against the kernels of other systems; quick: one model, one rank, few batches."""
    device = "cuda"
    torch.manual_seed(0)
    speed = copy_speed(device)
    with torch.inference_mode():
        rows = [{"model": model, **measure(case, device, speed)} for model, case in cases(quick)]
        merging = merge_ratio(device, speed)
        launches = decode_launches(device)
    return Measured(rows, goals=goals_of(rows, merging, launches))


def cases(quick: bool) -> Iterator[tuple[str, Case]]:
    """The cells of the report, each with its model's name."""
    models = list(MODELS.items())[: 1 if quick else None]
    for (model, shapes), rank, adapters, tokens in itertools.product(
        models, _RANKS[: 1 if quick else None], _ADAPTERS, (16, 1024) if quick else _TOKENS
    ):
        if adapters > tokens:
            continue
        for shape in shapes[:1] if quick else shapes:
            for even in (True, False) if 1 < adapters < tokens else (True,):
                yield model, Case(shape, rank, "bfloat16", adapters, tokens, even)


def measure(case: Case, device: str, bytes_per_s: float) -> dict[str, Any]:
    """One row: the operator, each style relative to it, and the byte floor."""
    groups = [case.group(device) for _ in range(_num_copies(case))]
    x, outputs = case.input(device)
    plan = case.plan()
    packed = groups[0].packed
    assert packed is not None
    # Without a tuning table, the kernels with their default tiles.
    chosen = choose(BatchStats(plan, packed.layout))
    ours = "tiled" if not chosen.startswith(("tiled", "grouped")) and device == "cuda" else chosen
    mine = case.plan(ours)
    together = torch.cat(outputs, 1)
    calls: dict[str, Callable[[], object]] = {"ours": functools.partial(_add_all, groups, mine, x, together)}
    for name in STYLES:
        calls[name] = functools.partial(
            _call_all, [prepare_call(name, group, plan.lanes, x, outputs) for group in groups]
        )
    if not case.even:
        each = [
            padded_einsum(*lane_factors(site, plan), plan, x, y)
            for group in groups
            for site, y in zip(group.sites, outputs, strict=True)
        ]
        calls["einsum"] = functools.partial(_call_all, each)
    timed = {name: _time(call, x.is_cuda, len(groups)) for name, call in calls.items()}
    elements = case.num_adapters * case.rank * sum(case.shape.d_in + d_out for d_out in case.shape.d_outs)
    elements += case.num_tokens * (case.shape.d_in + 2 * sum(case.shape.d_outs))
    row: dict[str, Any] = {
        "layer": f"{case.shape.d_in}x{'+'.join(map(str, case.shape.d_outs))}",
        "rank": case.rank,
        "tokens": case.num_tokens,
        "adapters": case.num_adapters,
        "segments": "even" if case.even else "uneven",
        "dtype": case.dtype,
        "us": timed["ours"].median * 1e6,
        "ours / floor": timed["ours"].median / (elements * x.element_size() / bytes_per_s),
        "p95 / p50": timed["ours"].high / timed["ours"].median,
        "chosen": ours,
    }
    for name in (*STYLES, "einsum"):
        row[name] = timed[name].median / timed["ours"].median if name in timed else None
    return row


def _num_copies(case: Case) -> int:
    factors = case.num_adapters * case.rank * sum(case.shape.d_in + d_out for d_out in case.shape.d_outs) * 2
    return max(1, min(MOST_COPIES, _CACHE_BYTES // factors))


def _add_all(groups: Sequence[atmm.SiteGroup], plan: atmm.SegmentPlan, x: Tensor, y: Tensor) -> None:
    """All of a group's sites in one call, as in the engine."""
    for group in groups:
        atmm.add_deltas(y, x, group, plan)


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _time(call: Callable[[], object], on_gpu: bool, parts: int) -> _Timing:
    """Replays of a graph on a GPU; elsewhere (for tests) the call itself."""
    timed = Replays(call) if on_gpu else functools.partial(_elapsed, call)
    timed()
    ordered = sorted(timed() / parts for _ in range(_REPLAYS if on_gpu else 1))
    return _Timing(statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))])


def _elapsed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copy_speed(device: str) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _time(lambda: target.copy_(source), True, 1).median


def merge_ratio(device: str, bytes_per_s: float) -> float:
    """Time to merge all linear layers of Qwen2-VL-7B out of place, relative to reading and writing them once."""
    seconds = floor = 0.0
    for shape in MODELS["Qwen2-VL-7B"]:
        for d_out in shape.d_outs:
            base = torch.zeros(_NUM_LAYERS, d_out, shape.d_in, dtype=torch.bfloat16, device=device)
            out = torch.empty_like(base)
            a = torch.randn(_NUM_LAYERS, 16, shape.d_in, device=device).bfloat16()
            bt = torch.randn(_NUM_LAYERS, 16, d_out, device=device).bfloat16()
            call = functools.partial(atmm.merge, out, base, a, bt, 1.0)
            seconds += _time(call, True, 1).median
            floor += 2 * base.numel() * base.element_size() / bytes_per_s
    return seconds / floor


def decode_launches(device: str) -> int:
    """Number of kernels for one layer's deltas: 16 tokens of 8 adapters of rank 16."""
    count = 0
    for shape in MODELS["Qwen2-VL-7B"]:
        case = Case(shape, 16, "bfloat16", 8, 16, True)
        group = case.group(device)
        x, outputs = case.input(device)
        plan, y = case.plan(), torch.cat(outputs, 1)
        _add_all([group], plan, x, y)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _add_all([group], plan, x, y)
            torch.cuda.synchronize()
        count += sum(1 for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return count


def goals_of(rows: Sequence[dict[str, Any]], merging: float, launches: int) -> list[Goal]:
    def least(name: str, tokens: int = 1) -> float:
        return min(row[name] for row in rows if row[name] and row["tokens"] >= tokens)

    prefill = [row["ours / floor"] for row in rows if row["tokens"] >= 1024]
    return [
        *(
            Goal(f"{name} / ours, 256 tokens or more, worst", least(name, 256), 2.0, False)
            for name in ("sgmv", "mbgmm")
        ),
        Goal("einsum / ours, 256 tokens or more, worst", least("einsum", 256), 2.0, False),
        Goal("vllm / ours, worst", least("vllm"), 1.2, False),
        *(Goal(f"{name} / ours, worst", least(name), 1.0, False) for name in STYLES if name != "vllm"),
        Goal("ours / byte floor, 1,024 tokens or more, worst", max(prefill), 1.4, True),
        Goal("kernels per layer in decode", launches, 8, True),
        Goal("merge of a 7B model / byte floor", merging, 1.3, True),
    ]
