"""What the two ways of dense adapters on several ranks cost here, measured on the code that serves them.

A product on its own says little: factors that stay in the cache are read for nothing, and around each of S-LoRA's
collectives values are put together and taken apart.
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
_FEATURES = 1024  # inputs and outputs of the layer that stands for all
_RANK = 128
_KEYS = [str(key) for key in range(8)]  # adapters by turns: 4 MiB of bfloat16, more than a core has to itself
_VALUES = 2**15  # of the collective that shows what a byte costs: as hidden values are, small

Add = Callable[[torch.Tensor, torch.Tensor, atmm.SegmentPlan], None]


def measure(group: Group, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Costs:
    """On all ranks together. num_tokens: of the batches to choose for."""
    x = torch.zeros(num_tokens, _FEATURES, dtype=dtype, device=device)
    y = torch.zeros_like(x)
    travels = hidden_dtype(num_tokens, device, dtype)
    few, many = (torch.zeros(count, dtype=travels, device=device) for count in (num_tokens, _VALUES))
    low, high = (_site(rank, x) for rank in (group.size, _RANK))
    gather = _two_gathered(group, x)
    # Where others use the machine too, a product's median says more of them than of it; a collective waits for ranks
    # that they hold up, so there it belongs to the cost.
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
    """Two layers that read one input, as gate and up do, of the least rank that can be split."""
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
    """Calls `adds` for the next adapter, all tokens being its own."""
    following = itertools.cycle([atmm.SegmentPlan(len(x), [atmm.Lane(key, 0, len(x), 1.0)]) for key in _KEYS])

    def call() -> None:
        plan = next(following)
        for add in adds:
            add(y, x, plan)

    return call


def _seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Of each, called by turns: all ranks in the same order."""
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(_TURNS + 1):
        for call, seconds in zip(calls, taken, strict=True):
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first prepares
                seconds.append(time.perf_counter() - started)
    return taken
