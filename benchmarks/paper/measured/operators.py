"""The operator and others on one layer: seconds of every call, for any segments."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import atmm
from atmm.batch_stats import BatchStats
from atmm.dispatch import choose
from atmm.segments import Lane, SegmentPlan
from atmm.strategies.registry import comes_transposed
from atmm.tuning.cold_cache import DeviceCaches, factors_of
from atmm.tuning.search import Case, Shape
from benchmarks.atmm import baselines, with_cold_caches
from benchmarks.paper.measuring import Setting
from benchmarks.plain_baselines import lane_factors, padded_einsum
from vlora.bench.timing import by_turns

OURS = "this project"
EINSUM = "einsum, padded (dLoRA)"
GATHER = "gather and bmm (Punica's baseline)"
LOOP, PEFT = "loop (Punica's baseline)", "PEFT"
SGMV, BGMV, MBGMM = "SGMV tiling (Punica)", "BGMV tiling (Punica)", "MBGMM tiling (S-LoRA)"
_ON_CPU = {"padded einsum": EINSUM, "gather and bmm": GATHER, "plain loop": LOOP, "PEFT layer": PEFT}
_ON_GPU = {"sgmv": SGMV, "bgmv": BGMV, "mbgmm": MBGMM}
_DTYPE = "bfloat16"  # of this operator

Seconds = dict[str, list[float]]


def lanes_of(segments: Sequence[int]) -> list[Lane]:
    """A lane per segment, for adapters "0", "1", ... in turn."""
    found, start = [], 0
    for number, count in enumerate(segments):
        found.append(Lane(str(number), start, start + count))
        start += count
    return found


def operator_seconds(
    setting: Setting, shape: Shape, rank: int, segments: Sequence[int], rounds: int, only: Sequence[str] = ()
) -> Seconds:
    """Time this operator and the others, with factors in memory.

    Args:
        setting: Its device and the others' type are used; on a CPU, torch's threads, and CPU seconds if there is one.
        shape: One site.
        rank: Of all adapters.
        segments: Tokens of each adapter.
        rounds: Times of every call.
        only: Others to time in addition to this operator; all by default.

    Returns:
        Seconds of every round, by operator.
    """
    torch.manual_seed(0)
    case = Case(shape, rank, _DTYPE, len(segments), sum(segments), True)
    with torch.inference_mode():
        on_gpu = setting.device.type == "cuda"
        calls, read = _on_gpu(case, segments) if on_gpu else _on_cpu(case, segments, setting.baseline_dtype)
        chosen = {name: call for name, call in calls.items() if name == OURS or not only or name in only}
        if on_gpu:
            return by_turns({name: _replayed(call) for name, call in chosen.items()}, rounds, shuffled=True)
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        caches = DeviceCaches("cpu", getattr(torch, _DTYPE))
        return by_turns(
            {name: with_cold_caches(call, caches, read, clock) for name, call in chosen.items()}, rounds, shuffled=True
        )


Calls = dict[str, Callable[[], object]]


def _on_cpu(case: Case, segments: Sequence[int], others_dtype: str) -> tuple[Calls, list[torch.Tensor]]:
    atmm.load_kernels()
    group, other_case = case.group("cpu"), case._replace(dtype=others_dtype)
    (site,), (other_site,) = group.sites, other_case.group("cpu").sites
    assert group.packed is not None
    (x, (y,)), (other_x, _) = case.input("cpu"), other_case.input("cpu")
    plan = SegmentPlan(case.num_tokens, lanes_of(segments))
    chosen = choose(BatchStats(plan, group.packed.layout), comes_transposed(x))
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
    from atmm.tuning.replays import Replays

    return Replays(call)


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def mean_ratio(cells: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Geometric mean over cells of an operator's time relative to this operator's; None if it was never timed."""
    ratios = [cell[name] / cell[OURS] for cell in cells if name in cell]
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None


def sites_of_a_layer(model: Any) -> tuple[list[Shape], int]:
    """The linear sites of a language model's first layer, and its number of layers. model: may be on `meta`."""
    sites = [
        Shape(module.in_features, (module.out_features,))
        for name, module in model.model.language_model.layers[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    return sites, len(model.model.language_model.layers)
