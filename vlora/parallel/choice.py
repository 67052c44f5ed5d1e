"""Selects an adapter's sharding over several ranks, if it is not configured: the one with less extra time per step.

`replicated` repeats on every rank reads and products that one rank could do for all; `slora` communicates instead. Both
are predicted from measurements at start, for a step in which a full batch decodes with this adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vlora.parallel.adapter_sharding import Way, plan_cut
from vlora.parallel.layer_sharding import LinearShard


class Costs(NamedTuple):
    """Measured costs in seconds, for a step with `num_tokens`.

    Attributes:
        gather_s, reduce_s: Of a collective for split factors, including its overhead.
        byte_s: Per byte in it, counted in the model's dtype even if values are sent in another one.
        factor_byte_s: Per byte of a factor, for reading and multiplying it.
    """

    num_tokens: int
    gather_s: float
    reduce_s: float
    byte_s: float
    factor_byte_s: float


class Layer(NamedTuple):
    """One layer that an adapter targets: the adapter's rank, the shard, and the group of layers with the same input."""

    rank: int
    shard: LinearShard
    group: str


class Choice(NamedTuple):
    """The selected option, and the predicted extra seconds per step of both."""

    way: Way
    replicated_s: float
    slora_s: float


def choose(layers: Iterable[Layer], itemsize: int, costs: Costs) -> Choice:
    """Predict both options and select the faster one.

    Args:
        layers: Layers of the language model that the adapter targets, with dense factors.
        itemsize: Bytes of a value.
        costs: Measured at start.
    """
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
    slora_s = len(gathers) * costs.gather_s + num_reduces * costs.reduce_s + moved_bytes * costs.byte_s
    return Choice("slora" if slora_s < replicated_s else "replicated", replicated_s, slora_s)


def break_even(layers: Callable[[int], Iterable[Layer]], itemsize: int, costs: Costs, size: int) -> float | None:
    """The adapter rank from which `slora` is predicted to be faster; None if it never is.

    A prediction is linear in the adapter's rank: collectives have a fixed cost, and each additional rank is read again
    or sent.

    Args:
        layers: The layers that an adapter of a given rank targets.
        itemsize: Bytes of a value.
        costs: Measured at start.
        size: Number of ranks, which divides the adapter's rank.
    """
    one, two = (choose(layers(rank), itemsize, costs) for rank in (size, 2 * size))
    saved_s = (two.replicated_s - one.replicated_s - two.slora_s + one.slora_s) / size  # per additional rank
    return size + (one.slora_s - one.replicated_s) / saved_s if saved_s > 0 else None
