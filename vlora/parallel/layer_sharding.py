"""Which rows or columns of each linear layer a rank holds (Megatron-LM's sharding). Arithmetic only.

q, k, v, gate and up are split by output features (column-parallel), o and down by input features (row-parallel), so
that an attention block or an MLP needs one all-reduce, at its end. Everything else is replicated.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from vlora.errors import BadConfig

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


class Span(NamedTuple):
    """Features [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class LinearShard(NamedTuple):
    """The inputs and outputs of a linear layer [d_out, d_in] that `rank` of `size` ranks holds.

    For a replicated layer every rank holds all of both.
    """

    rank: int
    size: int
    d_in: int
    d_out: int
    inputs: Span
    outputs: Span

    @classmethod
    def whole(cls, d_in: int, d_out: int) -> LinearShard:
        return cls(0, 1, d_in, d_out, Span(0, d_in), Span(0, d_out))

    @property
    def by_columns(self) -> bool:
        """Column-parallel: each rank computes some outputs from all inputs."""
        return self.outputs.size < self.d_out

    @property
    def by_rows(self) -> bool:
        """Row-parallel: each rank has some inputs, and the outputs are sums over ranks."""
        return self.inputs.size < self.d_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One rank's shard of a language model.

    KV heads are split; if there are fewer than ranks, each is held by all ranks that read it.

    Raises BadConfig for a number of ranks that does not divide the model.
    """

    rank: int
    size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        for count, what in ((self.num_heads, "attention heads"), (self.intermediate_size, "intermediate features")):
            if count % self.size:
                raise BadConfig(
                    f"tensor_parallel is {self.size}, which does not divide the model's {count} {what}; "
                    f"choose one of {self._choices()}"
                )
        if self.num_kv_heads % self.size and self.size % self.num_kv_heads:
            raise BadConfig(
                f"tensor_parallel is {self.size}: the model's {self.num_kv_heads} KV heads can neither be divided by "
                f"so many ranks nor replicated evenly over them; choose one of {self._choices()}"
            )

    def _choices(self) -> str:
        sizes = (
            size
            for size in range(1, self.num_heads + 1)
            if self.num_heads % size == 0
            and self.intermediate_size % size == 0
            and (self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0)
        )
        return ", ".join(map(str, sizes))

    @property
    def kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.size)

    def shard(self, name: str, d_in: int, d_out: int) -> LinearShard:
        """This rank's shard of the language model's linear layer `name`, which maps d_in to d_out features."""
        leaf = name.rpartition(".")[2]
        inputs, outputs = Span(0, d_in), Span(0, d_out)
        if leaf in ("k_proj", "v_proj"):
            first = self.rank * self.num_kv_heads // self.size
            outputs = Span(first * self.head_dim, (first + self.kv_heads) * self.head_dim)
        elif leaf in COLUMN_PARALLEL:
            outputs = self._even(d_out)
        elif leaf in ROW_PARALLEL:
            inputs = self._even(d_in)
        return LinearShard(self.rank, self.size, d_in, d_out, inputs, outputs)

    def _even(self, count: int) -> Span:
        share = count // self.size
        return Span(self.rank * share, (self.rank + 1) * share)
