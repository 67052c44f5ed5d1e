"""The operator, its strategies and others on one layer: figures 17 and 18, table 1 and figure 12 of V-LoRA, 7 to 9 of
Punica.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import atmm
from atmm.dispatch import choose
from atmm.segments import BatchStats, Lane, SegmentPlan
from atmm.tuning.search import Case, Shape
from atmm.tuning.timing import DeviceCaches, factors_of
from benchmarks.atmm import baselines, with_cold_caches
from benchmarks.paper.figure import RANK, Measuring, Setting
from benchmarks.plain_baselines import lane_factors, padded_einsum
from vlora.bench.report import Row
from vlora.bench.timing import by_turns, interleaved, work_seconds
from vlora.simulator.arrivals import punica
from vlora.simulator.workloads import PATTERNS

OURS = "this project"
EINSUM = "einsum, padded (dLoRA)"
_ON_CPU = {
    "padded einsum": EINSUM,
    "gather and bmm": "gather and bmm (Punica's baseline)",
    "plain loop": "loop (Punica's baseline)",
    "PEFT layer": "PEFT",
}
_ON_GPU = {"sgmv": "SGMV tiling (Punica)", "bgmv": "BGMV tiling (Punica)", "mbgmm": "MBGMM tiling (S-LoRA)"}
_DTYPE = "bfloat16"  # of this operator
_SITE, _GPU_SITE = Shape(896, (4864,)), Shape(4096, (4096,))

Calls = dict[str, Callable[[], object]]
Seconds = dict[str, list[float]]


def lanes_of(segments: Sequence[int]) -> list[Lane]:
    """A lane per segment, for adapters "0", "1", ... in turn."""
    found, start = [], 0
    for number, count in enumerate(segments):
        found.append(Lane(str(number), start, start + count))
        start += count
    return found


def segments_of(pattern: str, batch: int) -> list[int]:
    """Requests of each adapter in a batch: the shares of Punica's pattern, rounded, with at least one each."""
    shares = punica(pattern, batch)
    if shares is None:
        return [1] * batch
    if pattern == "skewed":
        drawn = random.Random(0).choices(range(len(shares)), shares, k=batch)
        return sorted((drawn.count(which) for which in set(drawn)), reverse=True)
    count = len(shares)
    return [batch // count + (place < batch % count) for place in range(min(count, batch))]


def operator_seconds(
    setting: Setting, shape: Shape, rank: int, segments: Sequence[int], rounds: int, only: Sequence[str] = ()
) -> Seconds:
    """Time this operator and the others, with factors in memory.

    Args:
        setting: Its device and the others' type are used; on a CPU, torch's threads, and CPU seconds if there is one.
        segments: Tokens of each adapter.
        only: Others to time in addition to this operator; all by default.
    """
    torch.manual_seed(0)
    case = Case(shape, rank, _DTYPE, len(segments), sum(segments), True)
    with torch.inference_mode():
        on_gpu = setting.device.type == "cuda"
        calls, read = _on_gpu(case, segments) if on_gpu else _on_cpu(case, segments, setting.baseline_dtype)
        chosen = {name: call for name, call in calls.items() if name == OURS or not only or name in only}
        if on_gpu:
            return by_turns({name: _replayed(call) for name, call in chosen.items()}, rounds, shuffled=True)
        return _with_cold_caches(setting, chosen, read, rounds)


def _with_cold_caches(setting: Setting, calls: Calls, read: Sequence[torch.Tensor], rounds: int) -> Seconds:
    caches, clock = DeviceCaches(str(setting.device), getattr(torch, _DTYPE)), work_seconds(setting.device)
    timed = {name: with_cold_caches(call, caches, read, clock) for name, call in calls.items()}
    return by_turns(timed, rounds, shuffled=True)


def _on_cpu(case: Case, segments: Sequence[int], others_dtype: str) -> tuple[Calls, list[torch.Tensor]]:
    atmm.load_kernels()
    group, other_case = case.group("cpu"), case._replace(dtype=others_dtype)
    (site,), (other_site,) = group.sites, other_case.group("cpu").sites
    assert group.packed is not None
    (x, (y,)), (other_x, _) = case.input("cpu"), other_case.input("cpu")
    plan = SegmentPlan(case.num_tokens, lanes_of(segments))
    chosen = choose(BatchStats(plan, group.packed.layout))
    ours = SegmentPlan(case.num_tokens, lanes_of(segments), chosen)
    others, read = baselines(other_site, plan, case.rank, other_x, other_x.new_zeros(case.num_tokens, site.d_out))
    calls: Calls = {OURS: functools.partial(atmm.add_delta, y, x, site, ours)}
    return calls | {_ON_CPU[name]: call for name, call in others.items()}, [*factors_of(group), *read]


def _on_gpu(case: Case, segments: Sequence[int]) -> tuple[Calls, list[torch.Tensor]]:
    from benchmarks.kernel_baselines import prepare_call  # needs Triton

    group = case.group("cuda")
    (site,) = group.sites
    x, outputs = case.input("cuda")
    plan = SegmentPlan(case.num_tokens, lanes_of(segments), "tiled")
    calls: Calls = {OURS: functools.partial(atmm.add_deltas, torch.cat(outputs, 1), x, group, plan)}
    calls |= {label: prepare_call(name, group, plan.lanes, x, outputs) for name, label in _ON_GPU.items()}
    calls[EINSUM] = padded_einsum(*lane_factors(site, plan), plan, x, outputs[0])
    return calls, []


def _replayed(call: Callable[[], object]) -> Callable[[], float]:
    from atmm.tuning.timing import Replays

    return Replays(call)


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def by_tokens(measuring: Measuring, segments: Mapping[str, Sequence[Sequence[int]]], rounds: int) -> list[Row]:
    """Times of all operators by number of tokens, and each call relative to the median of its operator.

    Args:
        segments: Tokens of each adapter, of several cases each, by kind.
        rounds: Of up to 256 tokens; of more, an eighth of them.
    """
    on_gpu = measuring.setting.device.type == "cuda"
    rows: list[Row] = []
    for kind, cases in segments.items():
        for own in cases:
            tokens = sum(own)
            turns = rounds if tokens <= 256 else max(10, rounds // 8)
            seconds = operator_seconds(measuring.setting, _GPU_SITE if on_gpu else _SITE, RANK, own, turns)
            middle = medians(seconds)
            rows += [
                {"segments": kind, "tokens": tokens, "operator": name, "us": 1e6 * middle[name]}
                | {"x this project": middle[name] / middle[OURS], "relative": [each / middle[name] for each in taken]}
                for name, taken in seconds.items()
            ]
    return rows


def stability(_: Measuring, rows: Sequence[Row]) -> list[Row]:
    """The spread of all calls of `by_tokens`. Fluctuation: the 95th percentile less the median, of the median."""
    spreads: list[Row] = []
    for name in dict.fromkeys(row["operator"] for row in rows):
        values = [value for row in rows if row["operator"] == name for value in row["relative"]]
        mean, cuts = statistics.fmean(values), statistics.quantiles(values, n=20)
        percentiles = {"90th percentile": cuts[17] / mean, "95th percentile": cuts[18] / mean}
        spreads.append({"operator": name, "average": 1.0, **percentiles, "fluctuation": cuts[18] - 1})
    return spreads


def by_pattern(measuring: Measuring, width: int, rank: int, ranks: Sequence[int], batches: Sequence[int]) -> list[Row]:
    """Times by popularity pattern and batch, of all operators at one rank and of this operator at several; and the
    roofline (Punica 7.1): FLOP and bytes of shrink and expand together, what is read a second, and a large product.
    """
    setting, shape = measuring.setting, Shape(width, (width,))
    others = [name for name in (*_ON_CPU.values(), *_ON_GPU.values()) if name != "PEFT"]
    rows: list[dict[str, Any]] = []
    for pattern in PATTERNS:
        for batch in batches:
            own = segments_of(pattern, batch)
            flop, num_bytes = 4 * batch * width * rank, 4 * (batch * (width + rank) + len(own) * width * rank)
            rounds = 3 * setting.rounds
            times = {
                ("all", rank): operator_seconds(setting, shape, rank, own, rounds, others),
                **{("ranks", each): operator_seconds(setting, shape, each, own, rounds, [OURS]) for each in ranks},
            }
            for (what, each), seconds in times.items():
                for name, taken in medians(seconds).items():
                    row = {"what": what, "pattern": pattern, "batch": batch, "rank": each, "operator": name}
                    rows.append(row | {"us": 1e6 * taken})
                    if what == "all" and name == OURS:
                        work = {"FLOP per byte": flop / num_bytes, "GFLOP/s": flop / taken / 1e9}
                        rows.append({"what": "roofline", "line": pattern, **work})
    intensities = [row["FLOP per byte"] for row in rows if row["what"] == "roofline"]
    roof = _roof(setting)
    for x in (min(intensities) / 1.5, max(intensities) * 3):
        for line, height in (("memory", roof["read"] * x), ("a large product", roof["product"])):
            work = {"FLOP per byte": x, "GFLOP/s": height / 1e9}
            rows.append({"what": "roofline", "line": f"{line}, as measured", **work})
    return rows


def _roof(setting: Setting) -> dict[str, float]:
    """Bytes read per second, and floating-point operations per second of a large product, of one thread or a GPU."""
    size = 2048 if setting.device.type == "cuda" else 768
    values = torch.ones(2**28 // 4, device=setting.device)
    left = torch.randn(size, size, device=setting.device, dtype=getattr(torch, setting.baseline_dtype))
    seconds = interleaved({"read": values.sum, "product": lambda: left @ left}, 5, clock=work_seconds(setting.device))
    work = {"read": values.nbytes, "product": 2 * size**3}
    return {name: work[name] / taken for name, taken in medians(seconds).items()}


def strategies(measuring: Measuring, inputs: Mapping[str, tuple[int, int, int]]) -> list[Row]:
    """Times of every strategy of the operator. inputs: tokens, width and rank by name."""
    setting, device = measuring.setting, str(measuring.setting.device)
    rows: list[Row] = []
    for name, (tokens, width, rank) in inputs.items():
        case = Case(Shape(width, (width,)), rank, _DTYPE, 1, tokens, True)
        with torch.inference_mode():
            group = case.group(device)
            (site,), (x, (y,)) = group.sites, case.input(device)
            plans = {
                strategy: SegmentPlan(tokens, lanes_of([tokens]), strategy)
                for strategy in atmm.STRATEGIES
                if strategy != "tiled" or device == "cuda"
            }
            calls: Calls = {own: functools.partial(atmm.add_delta, y, x, site, plan) for own, plan in plans.items()}
            rounds = setting.rounds if tokens <= 1024 else 3  # of long calls, which vary less
            taken = medians(_with_cold_caches(setting, calls, factors_of(group), rounds))
        best = min(taken.values())
        rows += [
            {"input": name, "tokens": tokens, "width": width, "rank": rank, "strategy": own, "ms": 1e3 * seconds}
            | {"x best": seconds / best}
            for own, seconds in taken.items()
        ]
    return rows
