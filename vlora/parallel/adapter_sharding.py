"""A rank's shard of an adapter's factors for one layer, and its layout in memory. For delta = (x a^T) b^T:

`replicated` (Punica section 7.2): the factor at the layer's split dimension is split with it, the other one is on every
rank. The delta of a column-parallel layer is then complete, and the delta of a row-parallel layer is a partial sum for
the base model's all-reduce: adapters need no extra communication.

`slora` (S-LoRA section 6): both factors are split. The hidden values x a^T are gathered (column-parallel layers, each
rank having some of the adapter's rank rows) or summed (row-parallel layers); then each rank adds its own outputs, in
row-parallel layers again as a partial sum for the base model's all-reduce. Layers are replicated if their adapter rank
or outputs are not divisible by the number of ranks.

Block-diagonal factors (BD-LoRA section 3) are cut along their blocks: no zeros are stored, and no communication is
needed. A rank keeps the blocks that overlap its part of the layer: one block if there are as many ranks as blocks,
several with fewer ranks, a part of one with more. Only if rank boundaries cut through several blocks, the dense form
(with its zeros) is cut instead.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import torch

from vlora.parallel.layer_sharding import LinearShard, Span

ShardingKind = Literal["replicated", "slora"]
Side = Literal["a", "b"]
FactorKind = Literal["dense", "blocks_a", "blocks_b", "gathered", "reduced", "replaced", "tokens"]
RowKind = Literal["scale", "shift", "gain", "input"]


class FactorShape(NamedTuple):
    """One layer's factors in memory: a [rows_a, d_in] and bt [rows_bt, d_out].

    dense: both have `rank` rows. blocks_a: a's `parts` block-diagonal blocks are side by side, each [rank / parts, d_in
    / parts], and bt's rows belong to them in order; blocks_b: the same with a and bt swapped.
    gathered: a has one of `parts` shares of the adapter's rank; reduced: bt has this rank's share of the outputs.
    replaced: a is the weight of the layer [d_out, d_in] instead of a delta; the rank is 0.
    tokens: a has the weight's rows of these `tokens` only.

    rows: further rows below dense factors: other changes than the factors' delta. scale: the relative change of each
    output without its bias (DoRA's g - 1). shift: added to the outputs (biases). gain: the relative change of each
    output (IA3's l - 1). input: the same of each input; it is a row of a, the others are rows of bt.
    """

    rank: int
    d_in: int
    d_out: int
    kind: FactorKind = "dense"
    parts: int = 1
    rows: tuple[RowKind, ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def rows_a(self) -> int:
        if self.kind in ("replaced", "tokens"):
            return len(self.tokens) or self.d_out
        return self.rank // self.parts if self.kind in ("blocks_a", "gathered") else self.rank + ("input" in self.rows)

    @property
    def rows_bt(self) -> int:
        return self.rank // self.parts if self.kind == "blocks_b" else self.rank + len(self.output_rows)

    @property
    def output_rows(self) -> tuple[RowKind, ...]:
        return tuple(row for row in self.rows if row != "input")

    @property
    def is_split(self) -> bool:
        """Whether using these factors needs communication between ranks."""
        return self.kind in ("gathered", "reduced")


class Blocks(NamedTuple):
    """Which factor is block-diagonal, and the number of blocks.

    On disk (PEFT's format) they are stacked: side a: a [r, d_in / num]; side b: b [d_out, r / num].
    """

    side: Side
    num: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Rows and columns of a and b as on disk (dense ones if `densified`), and the resulting shape."""

    shape: FactorShape
    a_rows: slice
    a_columns: slice
    b_rows: slice
    b_columns: slice
    densified: Blocks | None = None

    def apply(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """a [rows_a, d_in] and bt [rows_bt, d_out] of the shape, from a and b as on disk."""
        if self.densified is not None:
            if self.densified.side == "a":
                a = torch.block_diag(*a.chunk(self.densified.num))
            else:
                b = torch.block_diag(*b.chunk(self.densified.num))
        a, b = a[self.a_rows, self.a_columns], b[self.b_rows, self.b_columns]
        if self.shape.kind == "blocks_a":
            a = a.reshape(self.shape.parts, self.shape.rows_a, -1).transpose(0, 1).reshape(self.shape.rows_a, -1)
        return a, b.t()


_ALL = slice(None)


@functools.lru_cache(maxsize=4096)
def plan_cut(rank: int, shard: LinearShard, blocks: Blocks | None = None, sharding: ShardingKind = "replicated") -> Cut:
    """The part of the adapter's factors of rank `rank` that the shard's owner keeps. sharding: for dense factors."""
    inputs, outputs = shard.inputs, shard.outputs
    if blocks is not None and blocks.num > 1:
        return _block_cut(rank, shard, blocks)
    if sharding == "slora" and shard.by_columns and rank % shard.size == 0:
        share = rank // shard.size
        shape = FactorShape(rank, inputs.size, outputs.size, "gathered", shard.size)
        return Cut(shape, slice(shard.rank * share, (shard.rank + 1) * share), _ALL, outputs.slice, _ALL)
    if sharding == "slora" and shard.by_rows and shard.d_out % shard.size == 0:
        share = shard.d_out // shard.size
        shape = FactorShape(rank, inputs.size, share, "reduced", shard.size)
        return Cut(shape, _ALL, inputs.slice, slice(shard.rank * share, (shard.rank + 1) * share), _ALL)
    return Cut(FactorShape(rank, inputs.size, outputs.size), _ALL, inputs.slice, outputs.slice, _ALL)


def _block_cut(rank: int, shard: LinearShard, blocks: Blocks) -> Cut:
    inputs, outputs = shard.inputs, shard.outputs
    on_a = blocks.side == "a"
    mine, width = (inputs, shard.d_in // blocks.num) if on_a else (outputs, shard.d_out // blocks.num)
    first, last = mine.start // width, (mine.stop - 1) // width
    if mine.size % width and width % mine.size:  # by sizes alone, so that all ranks decide alike
        dense = FactorShape(rank, inputs.size, outputs.size)
        return Cut(dense, _ALL, inputs.slice, outputs.slice, _ALL, densified=blocks)
    parts, block_rank = last + 1 - first, rank // blocks.num
    ranks = slice(first * block_rank, (last + 1) * block_rank)
    kind: FactorKind = "dense" if parts == 1 else "blocks_a" if on_a else "blocks_b"
    shape = FactorShape(parts * block_rank, inputs.size, outputs.size, kind, parts)
    if on_a:
        within = Span(mine.start - first * width, mine.stop - first * width) if parts == 1 else Span(0, width)
        return Cut(shape, ranks, within.slice, outputs.slice, ranks)
    return Cut(shape, ranks, inputs.slice, outputs.slice, _ALL)


class Part(NamedTuple):
    """These outputs of a layer gain `(x[inputs] a^T) bt`; a [..., r, inputs], bt [..., r, outputs]."""

    outputs: slice
    inputs: slice
    a: torch.Tensor
    bt: torch.Tensor


def parts_of(shape: FactorShape, a: torch.Tensor, bt: torch.Tensor) -> list[Part]:
    """Views of the factors as dense ones: one part, or one per block.

    a [..., rows_a, d_in], bt [..., rows_bt, d_out]; the leading dimensions are layers of one shape.
    """
    assert not shape.is_split, "factors split over ranks are not a complete delta"
    assert not shape.rows, "further rows are not part of the factors' product"
    if shape.kind == "dense":
        return [Part(_ALL, _ALL, a, bt)]
    count = shape.parts
    if shape.kind == "blocks_a":
        width = shape.d_in // count
        spans = [slice(i * width, (i + 1) * width) for i in range(count)]
        own = bt.tensor_split(count, -2)
        return [Part(_ALL, span, a[..., span], part) for span, part in zip(spans, own, strict=True)]
    width = shape.d_out // count
    spans = [slice(i * width, (i + 1) * width) for i in range(count)]
    own = a.tensor_split(count, -2)
    return [Part(span, _ALL, part, bt[..., span]) for span, part in zip(spans, own, strict=True)]


def dense(shape: FactorShape, a: torch.Tensor, bt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same delta as one pair a [..., rank, d_in] and bt [..., rank, d_out], including zeros; not for serving.

    Further rows of bt are kept, and so are weights that replace a layer's.
    """
    if shape.rows or shape.kind in ("replaced", "tokens"):
        return a, bt
    parts = parts_of(shape, a, bt)
    if len(parts) == 1:
        return a, bt
    full_a = a.new_zeros(*a.shape[:-2], shape.rank, shape.d_in)
    full_bt = bt.new_zeros(*bt.shape[:-2], shape.rank, shape.d_out)
    rows = shape.rank // shape.parts
    for number, part in enumerate(parts):
        full_a[..., number * rows : (number + 1) * rows, part.inputs] = part.a
        full_bt[..., number * rows : (number + 1) * rows, part.outputs] = part.bt
    return full_a, full_bt
