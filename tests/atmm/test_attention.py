"""The compiled attention over paged KV, of tokens and of chunks, against a float64 reference."""

from __future__ import annotations

import math

import pytest
import torch

import atmm

needs_compiler = pytest.mark.skipif(
    not atmm.serves_attention(torch.device("cpu"), torch.float32), reason="no C++ compiler here"
)
# Lengths around the sizes of a vector, a tile and a piece of a context, and lengths of several pieces.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 600)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # rounding of the result


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, contexts: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """Attention of q [D, heads, dim], each row over its context, in float64. Returns [D, heads, dim]."""
    _, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=torch.float64)
    for n, rows in enumerate(contexts):
        group = heads // (k.shape[1] // dim)
        keys, values = (
            cache[rows].double().view(len(rows), -1, dim).repeat_interleave(group, 1).transpose(0, 1)
            for cache in (k, v)
        )
        scores = scale * keys @ q[n].double()[:, :, None]
        out[n] = (scores.softmax(1) * values).sum(1)
    return out


def make(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Queries, keys, values and contexts. The cache rows of a context are scattered; unused rows hold NaN."""
    generator = torch.Generator().manual_seed(heads * dim)
    num_rows = 2 * sum(lengths)
    k, v = (torch.randn(num_rows, kv_heads * dim, generator=generator).to(dtype) for _ in range(2))
    contexts = list(torch.randperm(num_rows, generator=generator)[: sum(lengths)].split(lengths))
    unused = torch.ones(num_rows, dtype=torch.bool)
    unused[torch.cat(contexts)] = False
    k[unused] = v[unused] = math.nan
    return torch.randn(len(lengths), heads, dim, generator=generator).to(dtype), k, v, contexts


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, contexts: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """Every second row of a batch attends; the other rows must not change."""
    batch = torch.full((2 * len(q), *q.shape[1:]), math.nan, dtype=q.dtype)
    places = torch.arange(len(q)) * 2 + 1
    batch[places] = q
    out = torch.full_like(batch, 7.0)
    starts = torch.tensor([0, *(len(rows) for rows in contexts)]).cumsum(0)
    atmm.attend(out, batch, k, v, places, torch.cat(contexts), starts, scale)
    assert (out[places - 1] == 7).all()
    return out[places]


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dim", (8, 64, 72, 128))
@pytest.mark.parametrize(("heads", "kv_heads"), ((1, 1), (4, 4), (6, 3), (3, 1), (14, 2), (8, 1), (10, 2)))
def test_every_grouping_and_length(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v, contexts = make(heads, kv_heads, dim, dtype)
    found = attend(q, k, v, contexts, dim**-0.5)
    expected = reference(q, k, v, contexts, dim**-0.5)
    assert float((found.double() - expected).abs().max()) < TOLERANCE[dtype]


@needs_compiler
def test_large_scores_are_exact_for_a_nearly_one_hot_softmax() -> None:
    q, k, v, contexts = make(14, 2, 64, torch.float32)
    found = attend(q, k, v, contexts, 20.0)
    torch.testing.assert_close(found.double(), reference(q, k, v, contexts, 20.0), atol=2e-4, rtol=0)


@needs_compiler
def test_strided_queries_and_caches_inside_larger_tensors() -> None:
    q, k, v, contexts = make(4, 2, 16, torch.float32)
    expected = attend(q, k, v, contexts, 0.25)
    wide = torch.stack([k, v], 1).view(len(k), -1)  # keys and values side by side: larger row strides
    places, starts = torch.arange(len(q)), torch.tensor([0, *(len(rows) for rows in contexts)]).cumsum(0)
    transposed = q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    out = torch.empty_like(q)
    atmm.attend(out, transposed, wide[:, :32], wide[:, 32:], places, torch.cat(contexts), starts, 0.25)
    assert torch.equal(out, expected)


# Chunks (tokens, tokens before them) around the sizes of a vector, a tile and a task.
CHUNKS = ((1, 0), (2, 0), (7, 126), (15, 1), (64, 0), (65, 0), (33, 95), (200, 3))


def attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Every second row of a batch attends; the other rows must not change."""
    batch = torch.full((2 * len(q), *q.shape[1:]), math.nan, dtype=q.dtype)
    places = torch.arange(len(q)) * 2 + 1
    batch[places] = q
    out = torch.full_like(batch, 7.0)
    atmm.attend_chunk(out, batch, k, v, places, rows, seen, scale)
    assert (out[places - 1] == 7).all()
    return out[places]


def make_chunk(
    num_tokens: int, before: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values, the context's rows and the numbers of seen tokens."""
    _, k, v, (rows,) = make(heads, kv_heads, dim, dtype, lengths=(before + num_tokens,))
    q = torch.randn(num_tokens, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    return q, k, v, rows, torch.arange(before + 1, before + num_tokens + 1)


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dim", (8, 24, 64, 72, 128))
@pytest.mark.parametrize(("heads", "kv_heads"), ((1, 1), (4, 4), (3, 1), (14, 2)))
def test_chunks_of_every_grouping_and_length(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    for num_tokens, before in CHUNKS:
        q, k, v, rows, seen = make_chunk(num_tokens, before, heads, kv_heads, dim, dtype)
        found = attend_chunk(q, k, v, rows, seen, dim**-0.5)
        expected = reference(q, k, v, [rows[:count] for count in seen], dim**-0.5)
        assert float((found.double() - expected).abs().max()) < TOLERANCE[dtype], (num_tokens, before)


@needs_compiler
def test_a_token_has_the_same_result_in_any_chunk() -> None:
    q, k, v, rows, seen = make_chunk(150, 20, 14, 2, 64, torch.float32)
    together = attend_chunk(q, k, v, rows, seen, 0.125)
    parts = [slice(0, 1), slice(1, 64), slice(64, 150)]
    apart = [attend_chunk(q[part], k, v, rows[: int(seen[part][-1])], seen[part], 0.125) for part in parts]
    assert torch.equal(together, torch.cat(apart))
    some = torch.tensor([3, 77, 149])
    assert torch.equal(together[some], attend_chunk(q[some], k, v, rows, seen[some], 0.125))


@needs_compiler
def test_large_scores_of_a_chunk_are_exact() -> None:
    """Softmax is nearly one-hot, and its largest score is in another tile for each token."""
    q, k, v, rows, seen = make_chunk(200, 100, 14, 2, 64, torch.float32)
    found = attend_chunk(q, k, v, rows, seen, 20.0)
    expected = reference(q, k, v, [rows[:count] for count in seen], 20.0)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=0)


@needs_compiler
@pytest.mark.parametrize("side", ("k", "v"))
def test_nan_of_a_later_token_does_not_affect_earlier_tiles(side: str) -> None:
    q, k, v, rows, seen = make_chunk(130, 0, 4, 2, 16, torch.bfloat16)
    clean = attend_chunk(q, k, v, rows, seen, 0.25)
    (k if side == "k" else v)[rows[129], 3] = math.nan  # in the first KV head, which heads 0 and 1 read
    found = attend_chunk(q, k, v, rows, seen, 0.25)
    assert found[129, :2].isnan().any(1).all() and torch.equal(found[:128], clean[:128])
    assert torch.equal(found[:, 2:], clean[:, 2:])


@needs_compiler
def test_mismatched_chunks_are_refused_before_anything_is_written() -> None:
    q, k, v, rows, seen = make_chunk(3, 0, 4, 2, 16, torch.float32)
    good = {"out": torch.zeros_like(q), "q": q, "k": k, "v": v, "places": torch.arange(3), "rows": rows, "seen": seen}
    for bad, text in (
        ({"seen": seen[:2]}, "as many"),
        ({"seen": seen.int()}, "int64"),
        ({"v": v.bfloat16()}, "types differ"),
    ):
        with pytest.raises(ValueError, match=text):
            atmm.attend_chunk(**{**good, **bad}, scale=1.0)  # type: ignore[arg-type]
    assert not good["out"].any()


@needs_compiler
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v, contexts = make(14, 2, 64, torch.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            both = attend(q, k, v, contexts, 0.125), attend_chunk(*make_chunk(90, 40, 14, 2, 64, torch.float32), 0.125)
            found.append(torch.cat(both))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@needs_compiler
@pytest.mark.parametrize("side", ("k", "v"))
def test_nan_in_one_context_does_not_affect_other_rows(side: str) -> None:
    q, k, v, contexts = make(4, 2, 16, torch.bfloat16, lengths=(20, 300, 5))
    clean = attend(q, k, v, contexts, 0.25)
    (k if side == "k" else v)[contexts[1][7], 3] = math.nan  # in the first KV head, which heads 0 and 1 read
    found = attend(q, k, v, contexts, 0.25)
    assert found[1, :2].isnan().any(1).all() and torch.equal(found[1, 2:], clean[1, 2:])
    assert torch.equal(found[0], clean[0]) and torch.equal(found[2], clean[2])


@needs_compiler
def test_mismatched_arguments_are_refused_before_anything_is_written() -> None:
    q, k, v, _ = make(4, 2, 16, torch.float32, lengths=(3,))
    good = {"out": torch.zeros_like(q), "q": q, "k": k, "v": v, "places": torch.tensor([0]), "rows": torch.arange(3)}
    good |= {"starts": torch.tensor([0, 3])}
    for bad, text in (
        ({"k": k[:, :24], "v": v[:, :24]}, "does not fit"),
        ({"out": torch.zeros(1, 16, 4).transpose(1, 2)}, "contiguous"),
        ({"v": v.bfloat16()}, "types differ"),
        ({"v": v.t().contiguous().t()}, "strides"),
        ({"starts": torch.tensor([0])}, "starts"),
        ({"places": torch.tensor([0], dtype=torch.int32)}, "int64"),
    ):
        with pytest.raises(ValueError, match=text):
            atmm.attend(**{**good, **bad}, scale=1.0)  # type: ignore[arg-type]
    assert not good["out"].any()
