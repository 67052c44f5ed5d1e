"""Decode attention over KV blocks in the interpreter, against attention in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atmm.triton import attention
from atmm.triton.attention import Scratch, decode, make_scratch, num_shares, padded_batch
from tests.atmm.cases import poisoned_memory
from tests.atmm.test_attention import TOLERANCE, reference

BLOCK = 16
RAGGED = (1, 2, 15, 16, 17, 63, 64, 65, 300)
"""Lengths around the sizes of a block and a tile, and of several tiles."""


class Case:
    """Queries and a KV matrix of two layers with scattered blocks.

    Rows without a token, also those in the last block of a context, are NaN, and so are the other layer's rows.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        lengths: tuple[int, ...] = RAGGED,
        block: int = BLOCK,
    ) -> None:
        generator = torch.Generator().manual_seed(heads * dim + len(lengths))
        self.block, self.block_rows = block, 5 * block  # two layers, and a remainder as in blocks of whole pages
        counts = [-(-length // block) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)].split(counts)
        self.matrix = torch.full(((sum(counts) + 3) * self.block_rows, kv_heads * dim), math.nan, dtype=dtype)
        self.keys = self.matrix[2 * block :]  # of layer 1
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32)  # read past a context: fails
        self.contexts = []
        for row, (length, blocks) in enumerate(zip(lengths, order, strict=True)):
            self.table[row, : len(blocks)] = blocks.int()
            tokens = torch.arange(length)
            rows = blocks[tokens // block] * self.block_rows + tokens % block
            self.contexts.append(rows)
            for side in (0, block):
                own = torch.randn(length, kv_heads * dim, generator=generator)
                self.keys[rows + side] = own.to(dtype)
        self.q = torch.randn(len(lengths), heads, dim, generator=generator).to(dtype)
        self.scale = dim**-0.5

    def decode(self, **changed: Any) -> torch.Tensor:
        sizes = {"block_rows": self.block_rows, "block_size": self.block, "scale": self.scale}
        return decode(**{"q": self.q, "kv_rows": self.keys, "block_table": self.table, "lengths": self.lengths}
                      | sizes | changed)  # fmt: skip

    def right(self, q: torch.Tensor | None = None) -> torch.Tensor:
        return reference(self.q if q is None else q, self.keys, self.keys[self.block :], self.contexts, self.scale)

    def error(self, found: torch.Tensor) -> float:
        return float((found.double() - self.right()).abs().max())


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "lengths", "block", "splits"),
    (
        *((*heads, RAGGED, BLOCK, None) for heads in ((7, 1, 64), (14, 2, 128), (8, 2, 16), (3, 3, 128), (16, 1, 32))),
        (16, 1, 32, (1025, 3000), BLOCK, None),
        *((4, 1, 64, (1, 64, 65, 130, 1000), BLOCK, splits) for splits in (1, 2, 3, 7, 16)),
        *((4, 2, 16, (1, 7, 64, 65, 200), block, None) for block in (1, 8, 32, 64)),
    ),
)
def test_every_grouping_length_block_and_number_of_splits(
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: tuple[int, ...],
    block: int,
    splits: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if splits is not None:
        monkeypatch.setattr(attention, "num_shares", lambda kv_heads, device: splits)
    case = Case(heads, kv_heads, dim, dtype, lengths, block)
    assert case.error(case.decode()) < TOLERANCE[dtype]


def test_rows_of_a_larger_batch_and_strided_queries() -> None:
    case = Case(14, 2, 64, torch.float32, (5, 70, 1))
    places = torch.tensor([4, 0, 6], dtype=torch.int32)
    batch = torch.full((14, 8, 64), math.nan)  # as transformers has it: heads, then tokens
    batch[:, places] = case.q.transpose(0, 1)
    out = torch.full((8, 14, 64), 7.0)
    scratch = make_scratch(14, 2, 64, torch.device("cpu"))
    assert case.decode(q=batch.transpose(0, 1), places=places, out=out, scratch=scratch) is out
    assert case.error(out[places]) < TOLERANCE[torch.float32]
    assert (out[[1, 2, 3, 5, 7]] == 7).all()


def test_scratch_of_a_step_is_used_again() -> None:
    cases = [Case(4, 2, 16, torch.float32, lengths) for lengths in ((200, 200), (1, 3))]
    scratch = make_scratch(4, 2, 16, torch.device("cpu"))
    for case in (cases[0], cases[1], cases[0]):
        assert case.error(case.decode(scratch=scratch)) < 1e-5


def test_a_padding_row_reads_one_token_only() -> None:
    case = Case(4, 2, 16, torch.float32, (30, 1, 1))
    case.table[1:] = case.table[1, 0]
    case.contexts[2] = case.contexts[1]
    assert case.error(case.decode()) < 1e-5


def test_large_scores_are_exact_for_a_nearly_one_hot_softmax() -> None:
    case = Case(14, 2, 64, torch.float32, (130, 40))
    case.scale = 20.0
    torch.testing.assert_close(case.decode().double(), case.right(), atol=2e-4, rtol=0)


@pytest.mark.parametrize("side", (0, BLOCK), ids=("keys", "values"))
def test_nan_in_one_context_does_not_affect_other_rows(side: int) -> None:
    case = Case(4, 2, 16, torch.float32, (20, 70, 5))
    clean = case.decode()
    case.keys[case.contexts[1][7] + side, 3] = math.nan  # in the first KV head, which heads 0 and 1 read
    found = case.decode()
    assert found[1, :2].isnan().any(1).all() and torch.equal(found[1, 2:], clean[1, 2:])
    assert torch.equal(found[0], clean[0]) and torch.equal(found[2], clean[2])


def test_mismatched_arguments_are_refused_before_anything_is_written() -> None:
    case = Case(4, 2, 16, torch.float32, (3,))
    out = torch.zeros(1, 4, 16)
    empty = Scratch(torch.zeros(0, 2, 1, 2, 16), torch.zeros(0, 2, 1, 2, 2))
    for bad, text in (
        ({"kv_rows": case.keys[:, :24]}, "does not fit"),
        ({"kv_rows": case.keys.bfloat16()}, "types differ"),
        ({"kv_rows": case.keys.t().contiguous().t()}, "adjacent"),
        ({"out": torch.zeros(1, 16, 4).transpose(1, 2)}, "contiguous"),
        ({"lengths": case.lengths.long()}, "int32"),
        ({"lengths": torch.ones(2, dtype=torch.int32)}, "block tables"),
        ({"block_size": 24}, "no kernel"),
        ({"scratch": empty}, "scratch"),
    ):
        with pytest.raises(ValueError, match=text):
            case.decode(**({"out": out} | bad))
    assert not out.any()


def test_shares_fill_a_gpu_and_few_kernels_serve_all_batches() -> None:
    assert [num_shares(kv_heads, torch.device("cpu")) for kv_heads in (1, 4, 32, 500)] == [264, 66, 8, 1]
    assert [padded_batch(batch) for batch in (1, 8, 9, 200)] == [8, 8, 16, 256]
