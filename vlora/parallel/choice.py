"""Which way an adapter lies on several ranks, where nobody has said: the one whose extra time per step is less.

`replicated` reads and multiplies again on every rank what one rank would do for all; `slora` talks instead. Both are
predicted from what was measured at start, for a step in which a full batch decodes with this adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vlora.parallel.adapter_sharding import Way, plan_cut
from vlora.parallel.layer_sharding import LinearShard


class Costs(NamedTuple):
    """Seconds, in a step with `num_tokens`. gather_s, reduce_s: what a collective for split factors adds, with all that
    is done around it; byte_s: each byte in it, in the model's dtype whatever values travel in. factor_byte_s: a byte of
    a factor, read and multiplied."""

    num_tokens: int
    gather_s: float
    reduce_s: float
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
    slora_s = len(gathers) * costs.gather_s + num_reduces * costs.reduce_s + moved_bytes * costs.byte_s
    return Choice("slora" if slora_s < replicated_s else "replicated", replicated_s, slora_s)


def break_even(layers: Callable[[int], Iterable[Layer]], itemsize: int, costs: Costs, size: int) -> float | None:
    """The rank of an adapter from which `slora` is predicted to be the faster way; None where it never is.

    layers: what an adapter of a rank targets; size: number of ranks, which divide it. A prediction is a straight line
    in the rank: collectives cost what they cost at any rank, and each rank more is read again or sent.
    """
    one, two = (choose(layers(rank), itemsize, costs) for rank in (size, 2 * size))
    saved_s = (two.replicated_s - one.replicated_s - two.slora_s + one.slora_s) / size  # by each rank more
    return size + (one.slora_s - one.replicated_s) / saved_s if saved_s > 0 else None
