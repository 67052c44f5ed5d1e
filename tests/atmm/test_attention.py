"""Attention over paged KV: the compiled kernels against float64, and the call of torch's flash kernel on a GPU."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import atmm
from atmm import flash_attention
from tests.atmm.flash_oracle import VERSIONS

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not atmm.serves_attention(CPU, torch.float32), reason="no C++ compiler here")
# Lengths around the sizes of a vector, a tile and a piece of a context, and lengths of several pieces.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 600)
# Chunks (tokens, tokens before them) around the sizes of a vector, a tile and a task.
CHUNKS = ((1, 0), (2, 0), (7, 126), (15, 1), (64, 0), (65, 0), (33, 95), (200, 3))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # rounding of the result


def reference(q: Tensor, k: Tensor, v: Tensor, contexts: list[Tensor], scale: float) -> Tensor:
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
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Queries, keys, values and contexts. The cache rows of a context are scattered; unused rows hold NaN."""
    generator = torch.Generator().manual_seed(heads * dim)
    num_rows = 2 * sum(lengths)
    k, v = (torch.randn(num_rows, kv_heads * dim, generator=generator).to(dtype) for _ in range(2))
    contexts = list(torch.randperm(num_rows, generator=generator)[: sum(lengths)].split(lengths))
    unused = torch.ones(num_rows, dtype=torch.bool)
    unused[torch.cat(contexts)] = False
    k[unused] = v[unused] = math.nan
    return torch.randn(len(lengths), heads, dim, generator=generator).to(dtype), k, v, contexts


def make_chunk(
    num_tokens: int, before: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, the context's rows and the numbers of seen tokens."""
    _, k, v, (rows,) = make(heads, kv_heads, dim, dtype, lengths=(before + num_tokens,))
    q = torch.randn(num_tokens, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    return q, k, v, rows, torch.arange(before + 1, before + num_tokens + 1)


def in_batch(q: Tensor, call: Callable[[Tensor, Tensor, Tensor], None]) -> Tensor:
    """Every second row of a batch attends; the other rows must not change."""
    batch = torch.full((2 * len(q), *q.shape[1:]), math.nan, dtype=q.dtype)
    places = torch.arange(len(q)) * 2 + 1
    batch[places] = q
    out = torch.full_like(batch, 7.0)
    call(out, batch, places)
    assert (out[places - 1] == 7).all()
    return out[places]


def starts_of(contexts: list[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(rows) for rows in contexts)]).cumsum(0)


def attend(q: Tensor, k: Tensor, v: Tensor, contexts: list[Tensor], scale: float) -> Tensor:
    rows, starts = torch.cat(contexts), starts_of(contexts)
    return in_batch(q, lambda out, batch, places: atmm.attend(out, batch, k, v, places, rows, starts, scale))


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, seen: Tensor, scale: float) -> Tensor:
    return in_batch(q, lambda out, batch, places: atmm.attend_chunk(out, batch, k, v, places, rows, seen, scale))


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", (8, 24, 64, 72, 128))
@pytest.mark.parametrize(("heads", "kv_heads"), ((1, 1), (4, 4), (6, 3), (3, 1), (14, 2), (8, 1), (10, 2)))
def test_every_grouping_and_length(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v, contexts = make(heads, kv_heads, dim, dtype)
    found, right = attend(q, k, v, contexts, dim**-0.5), reference(q, k, v, contexts, dim**-0.5)
    assert float((found.double() - right).abs().max()) < TOLERANCE[dtype]
    for num_tokens, before in CHUNKS if (heads, kv_heads) in ((1, 1), (4, 4), (3, 1), (14, 2)) else ():
        q, k, v, rows, seen = make_chunk(num_tokens, before, heads, kv_heads, dim, dtype)
        found = attend_chunk(q, k, v, rows, seen, dim**-0.5)
        right = reference(q, k, v, [rows[:count] for count in seen], dim**-0.5)
        assert float((found.double() - right).abs().max()) < TOLERANCE[dtype], (num_tokens, before)


@needs_compiler
def test_large_scores_are_exact_for_a_nearly_one_hot_softmax() -> None:
    """In a chunk, the largest score is in another tile for each token."""
    q, k, v, contexts = make(14, 2, 64, torch.float32)
    found = attend(q, k, v, contexts, 20.0)
    torch.testing.assert_close(found.double(), reference(q, k, v, contexts, 20.0), atol=2e-4, rtol=0)
    q, k, v, rows, seen = make_chunk(200, 100, 14, 2, 64, torch.float32)
    right = reference(q, k, v, [rows[:count] for count in seen], 20.0)
    torch.testing.assert_close(attend_chunk(q, k, v, rows, seen, 20.0).double(), right, atol=1e-3, rtol=0)


@needs_compiler
def test_strided_queries_and_caches_inside_larger_tensors() -> None:
    q, k, v, contexts = make(4, 2, 16, torch.float32)
    right = attend(q, k, v, contexts, 0.25)
    wide = torch.stack([k, v], 1).view(len(k), -1)  # keys and values side by side: larger row strides
    transposed, out = q.permute(2, 1, 0).contiguous().permute(2, 1, 0), torch.empty_like(q)
    places = torch.arange(len(q))
    atmm.attend(out, transposed, wide[:, :32], wide[:, 32:], places, torch.cat(contexts), starts_of(contexts), 0.25)
    assert torch.equal(out, right)


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
@pytest.mark.parametrize("side", ("k", "v"))
def test_nan_stays_in_its_context_and_its_tile(side: str) -> None:
    """In the first KV head, which heads 0 and 1 read."""
    q, k, v, contexts = make(4, 2, 16, torch.bfloat16, lengths=(20, 300, 5))
    clean = attend(q, k, v, contexts, 0.25)
    (k if side == "k" else v)[contexts[1][7], 3] = math.nan
    found = attend(q, k, v, contexts, 0.25)
    assert found[1, :2].isnan().any(1).all() and torch.equal(found[1, 2:], clean[1, 2:])
    assert torch.equal(found[0], clean[0]) and torch.equal(found[2], clean[2])
    q, k, v, rows, seen = make_chunk(130, 0, 4, 2, 16, torch.bfloat16)
    clean = attend_chunk(q, k, v, rows, seen, 0.25)
    (k if side == "k" else v)[rows[129], 3] = math.nan
    found = attend_chunk(q, k, v, rows, seen, 0.25)
    assert found[129, :2].isnan().any(1).all() and torch.equal(found[:128], clean[:128])
    assert torch.equal(found[:, 2:], clean[:, 2:])


@needs_compiler
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v, contexts = make(14, 2, 64, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            both = attend(q, k, v, contexts, 0.125), attend_chunk(*make_chunk(90, 40, 14, 2, 64, torch.float32), 0.125)
            found.append(torch.cat(both))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# -- torch's flash kernel, replaced by its CPU implementation in float64 ----------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize(("heads", "kv_heads"), ((4, 4), (14, 2), (3, 1)))
def test_sequences_attend_as_scaled_dot_product_attention(
    heads: int, kv_heads: int, causal: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention, "kernel", lambda: VERSIONS[version])
    num_q, num_k, dim = (1, 7, 5), (9, 7, 12), 16
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, sum(num_q), dim, generator=generator).transpose(0, 1)  # as transformers has it
    k, v = (torch.randn(sum(num_k), kv_heads, dim, generator=generator) for _ in range(2))
    first_q, first_k = (torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32) for counts in (num_q, num_k))
    found = atmm.flash(q, k, v, first_q, first_k, 7, 12, causal=causal, scale=0.3)
    parts = zip(found.split(num_q), q.split(num_q), k.split(num_k), v.split(num_k), strict=True)
    for own, queries, keys, values in parts:
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if causal:
            mask = mask.tril(len(keys) - len(queries))  # the last query attends all keys
        one, two, three = (side.transpose(0, 1)[None] for side in (queries, keys, values))
        wanted = F.scaled_dot_product_attention(one, two, three, attn_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(own, wanted[0].transpose(0, 1))


def test_the_installed_torch_accepts_the_call_as_the_oracle_does(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = inspect.signature(flash_attention.kernel())
    same = [
        v for v, oracle in VERSIONS.items() if list(inspect.signature(oracle).parameters) == list(signature.parameters)
    ]
    release = ".".join(torch.__version__.split(".")[:2])
    assert same == [release] or release not in VERSIONS
    called: list[inspect.BoundArguments] = []

    def bind(*given: Any, **named: Any) -> Tensor:
        called.append(signature.bind(*given, **named))
        return given[0]

    bind.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_attention, "kernel", lambda: bind)
    q, k, starts = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16), torch.tensor([0, 3], dtype=torch.int32)
    atmm.flash(q, k, k + 1, starts, starts + 1, 3, 4, causal=True, scale=0.3)
    (bound,) = called
    found = {name: value for name, value in bound.arguments.items() if not isinstance(value, Tensor)}
    grouped = {"enable_gqa": True} if "enable_gqa" in signature.parameters else {}
    assert found == {"max_q": 3, "max_k": 4, "scale": 0.3, "window_size": (-1, 0), **grouped}
    tensors = [name for name in bound.arguments if name not in found]
    assert tensors == ["query", "key", "value", "cu_seq_q", "cu_seq_k"]
    assert bound.arguments["cu_seq_k"][0] == 1 and bound.arguments["value"].all()


@pytest.mark.parametrize(
    ("capability", "device", "dtype", "dims", "served"),
    (
        ((9, 0), "cuda:0", torch.bfloat16, (64, 72, 80, 128, 256), True),
        ((9, 0), "cuda:0", torch.float16, (64, 256), True),
        ((9, 0), "cuda:0", torch.bfloat16, (20, 264), False),
        ((9, 0), "cuda:0", torch.float32, (64,), False),
        ((9, 0), "cpu", torch.bfloat16, (64,), False),
        ((7, 5), "cuda:0", torch.bfloat16, (64,), False),
    ),
)
def test_types_sizes_and_devices_of_the_flash_kernel(
    capability: tuple[int, int], device: str, dtype: torch.dtype, dims: tuple[int, ...], served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [atmm.serves_flash(torch.device(device), dtype, dim) for dim in dims] == [served] * len(dims)
