"""The layouts of a step's attention, on a GPU with torch's kernel replaced by its CPU implementation.

Rows that no context of a batch has are NaN, so other requests' KV cannot affect an answer.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import atmm
from atmm import flash_attention
from tests.atmm.flash_oracle import VERSIONS
from vlora.models.attention import (
    KVCache,
    PagedChunk,
    PagedDecodes,
    PrefillSpan,
    Queries,
    StepAttention,
    paged_attention,
    token_rows,
)
from vlora.models.forward_batch import GatheredDecodes, Row, lane_by_lane, queries_of
from vlora.models.gpu.attention import BlockDecodes, FlashChunks, GpuAttention
from vlora.types import BatchItem

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 4, 2, 16, 4, 2
BLOCK_ROWS = 2 * LAYERS * BLOCK + BLOCK  # with a remainder, as in blocks of whole pages
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    layer_idx = 0


class Packed:
    """A packed batch: requests with (first, last) tokens, and the batch indices that are read in the last layer."""

    def __init__(self, spans: list[tuple[int, int]], read: list[list[int]] | None = None) -> None:
        generator = np.random.default_rng(len(spans))
        blocks = [-(-last // BLOCK) for _, last in spans]
        self.num_blocks = sum(blocks) + 2
        order = generator.permutation(self.num_blocks)
        self.rows: list[Row] = []
        start = 0
        for (first, last), count in zip(spans, blocks, strict=True):
            own, order = order[:count], order[count:]
            context = (own[:, None] * BLOCK_ROWS + np.arange(BLOCK)).reshape(-1)[:last]
            state: Any = None
            self.rows.append(Row(state, None, start, start + last - first, first, last, context, True))
            start += last - first
        self.num_tokens = start
        self.write_rows = np.concatenate([row.context[row.first :] for row in self.rows])
        self.read = read

    def read_rows(self) -> list[np.ndarray]:
        if self.read is None:
            return [np.arange(row.stop - 1, row.stop) for row in self.rows]
        return [np.array(own, dtype=np.int64) for own in self.read]


def attend(packed: Packed, gpu: GpuAttention, *, last_layer: bool) -> tuple[torch.Tensor, list[Queries]]:
    """The attention of one layer, [tokens, heads, dim], and its queries. Rows that no context has are NaN."""
    generator = torch.Generator().manual_seed(packed.num_tokens)
    matrix = torch.full((packed.num_blocks * BLOCK_ROWS, KV_HEADS * DIM), math.nan)
    for row in packed.rows:
        for side in (0, BLOCK):
            matrix[row.context + side] = torch.randn(row.last, KV_HEADS * DIM, generator=generator)
    query = torch.randn(1, HEADS, packed.num_tokens, DIM, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, packed.num_tokens, DIM, generator=generator) for _ in range(2))
    batch: Any = packed
    queries, last, _ = queries_of(batch, torch.float32, gpu, torch.from_numpy)
    chosen = last if last_layer else queries
    step = StepAttention(KVCache(matrix, LAYERS, BLOCK), torch.from_numpy(packed.write_rows), chosen, chosen)
    out, _ = paged_attention(Layer(), query, key, value, None, vlora_step=step)
    return out[0], chosen


PLAIN = GpuAttention(CPU, BLOCK, BLOCK_ROWS, decodes=False, prefills=False)
FLASH = GpuAttention(CPU, BLOCK, BLOCK_ROWS, decodes=False, prefills=True)

BATCHES = {
    "first chunks": [(0, 7), (0, 12)],
    "a later chunk": [(5, 11)],
    "first and later chunks": [(0, 7), (9, 14), (0, 3)],
    "decode tokens between": [(0, 7), (6, 7), (0, 1), (3, 9), (20, 21)],
    "decode tokens around": [(6, 7), (0, 9), (30, 31)],
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_flash_equals_the_plain_attention(
    spans: list[tuple[int, int]], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention, "kernel", lambda: VERSIONS[version])
    packed = Packed(spans)
    monkeypatch.setattr("atmm.serves_attention", lambda *_: False)
    wanted, plain = attend(packed, PLAIN, last_layer=False)
    found, queries = attend(packed, FLASH, last_layer=False)
    assert isinstance(queries[0], FlashChunks) and isinstance(plain[0], PrefillSpan)
    torch.testing.assert_close(found, wanted)


DECODES = {"equal": [(6, 7), (6, 7)], "ragged": [(1, 2), (8, 9), (30, 31)]}


@pytest.mark.parametrize("spans", (BATCHES | DECODES).values(), ids=BATCHES | DECODES)
def test_the_compiled_attention_equals_the_plain_one(
    spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not atmm.serves_attention(CPU, torch.float32):
        pytest.skip("no C++ compiler here")
    packed = Packed(spans)
    found, queries = attend(packed, PLAIN, last_layer=False)
    monkeypatch.setattr("atmm.serves_attention", lambda *_: False)
    wanted, plain = attend(packed, PLAIN, last_layer=False)
    decodes = spans in DECODES.values()
    assert isinstance(queries[0], PagedDecodes if decodes else PagedChunk)
    assert isinstance(plain[0], GatheredDecodes if decodes else PrefillSpan)
    assert found.isfinite().all()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "read", ([[2, 3, 4], [12]], [[0, 3, 6], [7, 12, 13]], [[], [9, 13]], [list(range(7)), []]), ids=str
)
def test_rows_that_are_read_in_the_last_layer(read: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A head reads some tokens of a prompt: the tokens between them are computed, and undefined."""
    monkeypatch.setattr(flash_attention, "kernel", lambda: VERSIONS["2.13"])
    packed = Packed([(0, 7), (4, 11)], read)
    rows = [row for own in read for row in own]
    wanted, _ = attend(packed, PLAIN, last_layer=True)
    found, queries = attend(packed, FLASH, last_layer=True)
    assert isinstance(queries[0], FlashChunks)
    torch.testing.assert_close(found[rows], wanted[rows])


def test_only_chunks_with_earlier_tokens_are_gathered() -> None:
    for spans, gathered in (([(0, 7), (6, 7), (0, 2)], None), ([(0, 7), (6, 7), (3, 5)], 7 + 1 + 5)):
        packed: Any = Packed(spans)
        queries, _, _ = queries_of(packed, torch.float32, FLASH, torch.from_numpy)
        chunks = queries[0]
        assert isinstance(chunks, FlashChunks)
        assert (chunks.rows is None) if gathered is None else (len(chunks.rows) == gathered)  # type: ignore[arg-type]
        assert chunks.longest_q == 7 and {chunks.starts_q.dtype, chunks.starts_k.dtype} == {torch.int32}


def test_decode_tokens_are_laid_out_in_one_array_of_blocks() -> None:
    packed: Any = Packed([(4, 9), (0, 1), (70, 71)])
    gpu = GpuAttention(CPU, BLOCK, BLOCK_ROWS, decodes=True, prefills=False)
    queries, last, _ = queries_of(packed, torch.float32, gpu, torch.from_numpy)
    tokens, last_tokens = queries[-1], last[-1]
    assert isinstance(tokens, BlockDecodes) and isinstance(last_tokens, BlockDecodes)
    assert tokens.places.tolist() == [5, 6] and tokens.lengths.tolist() == [1, 71]
    assert last_tokens.places.tolist() == [4, 5, 6] and last_tokens.lengths.tolist() == [9, 1, 71]
    assert tokens.block_table.shape == (2, 32)  # 18 blocks, in a multiple of 16 columns
    for row, length, table in zip(packed.rows[1:], (1, 71), tokens.block_table, strict=True):
        tokens_of_row = np.arange(length)
        rows = table.numpy()[tokens_of_row // BLOCK] * BLOCK_ROWS + tokens_of_row % BLOCK
        assert (rows == row.context[:length]).all()
    storages = {t.untyped_storage().data_ptr() for t in (tokens.places, tokens.lengths, tokens.block_table)}
    assert len(storages) == 1 and tokens.block_table.dtype == torch.int32


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[BatchItem], str | None]:
    adapters = draw(st.lists(st.sampled_from([None, "a", "b", "c", "d", "e"]), min_size=1, max_size=20))
    sizes = draw(st.lists(st.integers(1, 70), min_size=len(adapters), max_size=len(adapters)))
    items = [
        BatchItem(str(place), adapter, 0, size, (), True)
        for place, (adapter, size) in enumerate(zip(adapters, sizes, strict=True))
    ]
    return items, draw(st.sampled_from([None, "a", "b", "f"]))


@given(batches())
def test_tokens_are_sorted_by_adapter_short_lanes_first_the_merged_one_last(
    batch: tuple[list[BatchItem], str | None],
) -> None:
    items, merged = batch
    ordered = lane_by_lane(items, merged)
    assert sorted(map(items.index, ordered)) == list(range(len(items)))
    runs = [(adapter, list(run)) for adapter, run in itertools.groupby(ordered, key=lambda item: item.adapter)]
    assert len({adapter for adapter, _ in runs}) == len(runs)
    if merged is not None and merged in dict(runs):
        assert runs.pop()[0] == merged
    lengths = [sum(item.num_tokens for item in run) for _, run in runs]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("by_column", [False, True])
def test_rows_are_contiguous_whatever_order_a_projection_stores(by_column: bool) -> None:
    projected = torch.randn(7, HEADS * DIM)
    stored = projected.t().contiguous().t() if by_column else projected
    states = stored.view(1, 7, HEADS, DIM).transpose(1, 2)
    rows = token_rows(states)
    assert rows.stride(1) == 1 and torch.equal(rows, projected)
    cache = torch.zeros(2, 16, HEADS * DIM)
    places = torch.arange(3, 10)
    atmm.write_kv(cache[0], cache[1], rows, rows, places)
    assert torch.equal(cache[0, places], projected)
    if by_column:
        with pytest.raises(ValueError, match="contiguous rows"):
            atmm.write_kv(cache[0], cache[1], stored, stored, places)
