"""Which way an adapter lies on several ranks, where nobody has said: the one whose extra time per step is less.

`replicated` reads and multiplies again on every rank what one rank would do for all; `slora` talks instead. Both are
predicted from what was measured at start, for a step in which a full batch decodes with this adapter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vlora.parallel.cut import Way, plan_cut
from vlora.parallel.group import Group
from vlora.parallel.plan import LinearShard

_REPEATS = 7
_RANK, _FEATURES = 64, 1024  # of the product that stands for adapters' products
_MANY = 2**18  # values of the collective that shows what a byte costs


class Costs(NamedTuple):
    """Seconds of a collective, as `call_s + byte_s * bytes`, and of a factor's byte in a product with `num_tokens`."""

    num_tokens: int
    call_s: float
    byte_s: float
    factor_byte_s: float


class Layer(NamedTuple):
    """One layer that an adapter targets: its rank there, the shard, and which layers read the same input."""

    rank: int
    shard: LinearShard
    group: str


class Choice(NamedTuple):
    """replicated_s, slora_s: what each way adds to a step."""

    way: Way
    replicated_s: float
    slora_s: float


def measure(group: Group, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Costs:
    """Time collectives and a product, on all ranks together. num_tokens: of the batches to choose for."""
    few, many = torch.zeros(num_tokens, dtype=dtype, device=device), torch.zeros(_MANY, dtype=dtype, device=device)
    few_s = _median(lambda: group.all_reduce(few, "start"), device)
    many_s = _median(lambda: group.all_reduce(many, "start"), device)
    byte_s = max(0.0, many_s - few_s) / (many.nbytes - few.nbytes)
    x = torch.zeros(num_tokens, _FEATURES, dtype=dtype, device=device)
    a = torch.zeros(_RANK, _FEATURES, dtype=dtype, device=device)
    # Less what a call costs whatever its size: that is paid either way.
    product_s = _median(lambda: F.linear(x, a), device) - _median(lambda: F.linear(x, a[:1]), device)
    return Costs(num_tokens, few_s, byte_s, max(0.0, product_s) / a.nbytes)


def choose(layers: Iterable[Layer], itemsize: int, costs: Costs) -> Choice:
    """layers: those of the language model that the adapter targets, with dense factors. itemsize: bytes of a value."""
    repeated_bytes = 0
    gathers: set[str] = set()
    num_reduces = moved_bytes = 0
    for rank, shard, group in layers:
        kind = plan_cut(rank, shard, None, "slora").shape.kind
        others = shard.size - 1
        if kind == "gathered":
            gathers.add(group)
            repeated_bytes += rank * shard.d_in * itemsize * others // shard.size
            moved_bytes += costs.num_tokens * rank * itemsize // shard.size
        elif kind == "reduced":
            num_reduces += 1
            repeated_bytes += rank * shard.d_out * itemsize * others // shard.size
            moved_bytes += costs.num_tokens * rank * itemsize
    replicated_s = repeated_bytes * costs.factor_byte_s
    slora_s = (len(gathers) + num_reduces) * costs.call_s + moved_bytes * costs.byte_s
    return Choice("slora" if slora_s < replicated_s else "replicated", replicated_s, slora_s)


def _median(call: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
