"""Measures the costs of both shardings of dense adapters on several ranks, with the code that serves them.

Timing a single product would be misleading: cached factors are read at no cost, and each of S-LoRA's collectives
also packs and unpacks values.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch

import atmm
from atmm.shrink_expand import hidden_dtype
from vlora.lora.sharded import ReducedLayer, gathered
from vlora.parallel import Group
from vlora.parallel.adapter_sharding import FactorShape
from vlora.parallel.choice import Costs

_TURNS = 15
_FEATURES = 1024  # inputs and outputs of the layer that represents all layers
_RANK = 128
_KEYS = [str(key) for key in range(8)]  # adapters used in turn: 4 MiB of bfloat16, more than a core's private cache
_VALUES = 2**15  # size of the collective that measures the cost per byte; small, like hidden values

Add = Callable[[torch.Tensor, torch.Tensor, atmm.SegmentPlan], None]


def measure(group: Group, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Costs:
    """Measure the costs. All ranks must call it together. num_tokens: size of the batches to choose a sharding for."""
    x = torch.zeros(num_tokens, _FEATURES, dtype=dtype, device=device)
    y = torch.zeros_like(x)
    travels = hidden_dtype(num_tokens, device, dtype)
    few, many = (torch.zeros(count, dtype=travels, device=device) for count in (num_tokens, _VALUES))
    low, high = (_site(rank, x) for rank in (group.size, _RANK))
    gather = _two_gathered(group, x)
    # On a shared machine a product's median includes interference, so the lower quartile is used. For a collective
    # the interference on other ranks is part of the cost.
    low_s, high_s = (
        statistics.quantiles(taken, n=4)[0]
        for taken in _seconds(
            [
                _adding([lambda *args: atmm.add_delta(args[0], args[1], low, args[2])], x, y),
                _adding([lambda *args: atmm.add_delta(args[0], args[1], high, args[2])], x, y),
            ],
            device,
        )
    )
    gather_s, reduce_s, few_s, many_s = (
        statistics.median(taken)
        for taken in _seconds(
            [
                _adding(gather, x, y),
                _adding([_reduced(group, x)], x, y),
                lambda: group.all_reduce(few, "start"),
                lambda: group.all_reduce(many, "start"),
            ],
            device,
        )
    )
    return Costs(
        num_tokens,
        gather_s=max(0.0, gather_s - len(gather) * low_s),
        reduce_s=max(0.0, reduce_s - low_s),
        byte_s=max(0.0, many_s - few_s) / ((_VALUES - num_tokens) * dtype.itemsize),
        factor_byte_s=max(0.0, high_s - low_s) / (2 * (_RANK - group.size) * _FEATURES * dtype.itemsize),
    )


def _site(rank: int, x: torch.Tensor) -> atmm.Site:
    """A replicated layer."""
    site = atmm.Site(f"rank {rank}", _FEATURES, _FEATURES)
    site.factors.update((key, atmm.Factors(*_factors(x, rank, rank, _FEATURES))) for key in _KEYS)
    return site


def _two_gathered(group: Group, x: torch.Tensor) -> Sequence[Add]:
    """Two layers with the same input, like gate and up, with the smallest LoRA rank that can be split."""
    layers = gathered(group, 2)
    shape = FactorShape(group.size, _FEATURES, _FEATURES, "gathered", group.size)
    for layer, key in itertools.product(layers, _KEYS):
        layer.attach(key, shape, _factors(x, 1, group.size, _FEATURES))
    return [layer.add for layer in layers]


def _reduced(group: Group, x: torch.Tensor) -> Add:
    layer = ReducedLayer(group)
    shape = FactorShape(group.size, _FEATURES, _FEATURES // group.size, "reduced", group.size)
    for key in _KEYS:
        layer.attach(key, shape, _factors(x, group.size, group.size, _FEATURES // group.size))
    return layer.add


def _factors(like: torch.Tensor, rows_a: int, rows_bt: int, d_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    return like.new_zeros(rows_a, _FEATURES), like.new_zeros(rows_bt, d_out)


def _adding(adds: Iterable[Add], x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A function that calls `adds` for the next adapter in turn, with a single lane for all tokens."""
    following = itertools.cycle([atmm.SegmentPlan(len(x), [atmm.Lane(key, 0, len(x), 1.0)]) for key in _KEYS])

    def call() -> None:
        plan = next(following)
        for add in adds:
            add(y, x, plan)

    return call


def _seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Times of each call. The calls take turns, in the same order on all ranks."""
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(_TURNS + 1):
        for call, seconds in zip(calls, taken, strict=True):
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first turn is a warm-up
                seconds.append(time.perf_counter() - started)
    return taken
