"""Attention over pages: its error against float64, and its time against the bytes and against torch's attention.

Torch attends over contiguous KV of equal lengths (`scaled_dot_product_attention` with its flash kernel), which no
server has: pages and unequal lengths cost the difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlora.bench.dummy import clip_config, llava_config
from vlora.bench.gpu.context import Context, device_seconds, memory_speed
from vlora.bench.report import Goal
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.memory.arena import PAGE_BYTES, block_pages
from vlora.memory.host_to_device import Inline
from vlora.models.attention import StepAttention, paged_attention
from vlora.models.loading import dummy_model
from vlora.types import Batch, BatchItem, Mode, Request

BLOCK_SIZE = 16
_LONGEST = 32_768


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Chunk(NamedTuple):
    """One request's share of the batch: `num_tokens` tokens after a context of `start` tokens."""

    start: int
    num_tokens: int


class PagedBatch:
    """Requests of the given lengths, a chunk of each, with their blocks in random order. Each layer has its own KV."""

    def __init__(
        self, chunks: Sequence[Chunk], heads: Heads, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.chunks, self.heads, self.num_layers = chunks, heads, num_layers
        kv_dim = heads.num_kv_heads * heads.head_dim
        # One more layer: of the last one, the engine computes only the tokens that are read.
        pages = block_pages(num_layers + 1, BLOCK_SIZE, kv_dim, dtype)
        tables = _tables([-(-(chunk.start + chunk.num_tokens) // BLOCK_SIZE) for chunk in chunks])
        num_blocks = 2 + sum(map(len, tables))
        engine = _engine(heads, num_layers + 1, dtype, device, num_blocks * pages * PAGE_BYTES)
        self.matrix = engine.parts.device.arena.kv_matrix(dtype, kv_dim).normal_()
        self._step = _attention_of(engine, chunks, tables)
        block_rows = pages * PAGE_BYTES // (kv_dim * dtype.itemsize)
        self.contexts = [
            torch.tensor([block * block_rows + row for block in table for row in range(BLOCK_SIZE)], device=device)
            for table in tables
        ]
        shapes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self.q, self.k, self.v = (
            torch.randn(1, number, num_tokens, heads.head_dim, dtype=dtype, device=device) for number in shapes
        )
        self._modules: list[Any] = [SimpleNamespace(layer_idx=layer) for layer in range(num_layers)]

    def attend(self, layer: int = 0) -> Tensor:
        """Write the batch's KV and attend."""
        out, _ = paged_attention(self._modules[layer], self.q, self.k, self.v, None, vlora_step=self._step)
        return out[0]

    def attend_all(self) -> None:
        for layer in range(self.num_layers):
            self.attend(layer)

    @property
    def kv_bytes(self) -> int:
        """KV of one layer that the batch reads."""
        tokens = sum(chunk.start + chunk.num_tokens for chunk in self.chunks)
        return 2 * tokens * self.heads.num_kv_heads * self.heads.head_dim * self.q.element_size()

    def context_of(self, index: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """K and V of one request's whole context after `attend`, [context, kv_heads, head_dim], gathered."""
        chunk = self.chunks[index]
        rows = self.contexts[index][: chunk.start + chunk.num_tokens] + 2 * layer * BLOCK_SIZE
        shape = (-1, self.heads.num_kv_heads, self.heads.head_dim)
        return self.matrix[rows].view(shape), self.matrix[rows + BLOCK_SIZE].view(shape)

    def exact(self, index: int, layer: int = 0) -> Tensor:
        """The result of one request's tokens in float64, [tokens, heads, head_dim], after `attend`."""
        chunk = self.chunks[index]
        first = sum(each.num_tokens for each in self.chunks[:index])
        q = self.q[0, :, first : first + chunk.num_tokens].double()
        k, v = (each.double().transpose(0, 1) for each in self.context_of(index, layer))
        group = self.heads.num_heads // self.heads.num_kv_heads
        seen = torch.arange(chunk.start + chunk.num_tokens, device=q.device)
        limit = chunk.start + torch.arange(chunk.num_tokens, device=q.device)
        mask = seen[None] > limit[:, None]
        out = []
        for head in range(self.heads.num_heads):
            scores = q[head] @ k[head // group].T * self.heads.head_dim**-0.5
            out.append(scores.masked_fill(mask, float("-inf")).softmax(-1) @ v[head // group])
        return torch.stack(out, 1)


def _tables(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """A block table for each number of blocks; the blocks are in random order."""
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    tables = []
    for count in counts:
        tables.append(tuple(order[:count]))
        del order[:count]
    return tables


def _engine(heads: Heads, num_layers: int, dtype: torch.dtype, device: torch.device, arena_bytes: int) -> Engine:
    text: dict[str, Any] = {
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "max_position_embeddings": _LONGEST,
    }
    width = 16 * heads.num_heads  # a multiple, as transformers checks
    tower = clip_config((16, 16), 1, 1, 28, 16)
    model_config = llava_config((128, 127), (width, 64), num_layers, heads.num_heads, tower, **text)
    name = str(dtype).removeprefix("torch.")
    model = dummy_model(model_config, name, device, 0)
    config = EngineConfig(
        model="dummy",
        device=str(device),
        dtype=name,
        block_size=BLOCK_SIZE,
        arena_bytes=arena_bytes,
        cuda_graphs=False,  # a replay has no inputs that could be kept
    )
    return Engine(config, model=model, executor=Inline())


def _attention_of(engine: Engine, chunks: Sequence[Chunk], tables: Sequence[tuple[int, ...]]) -> StepAttention:
    """The attention inputs of a step with these chunks, from the engine's own runner."""
    kept: list[StepAttention] = []
    hf_model, runner = engine.parts.device.hf_model, engine.parts.device.runner
    forward = hf_model.forward

    def keeping(embeddings: Tensor, positions: Tensor, step: StepAttention, *rest: Any) -> Tensor:
        kept.append(step)
        return forward(embeddings, positions, step, *rest)

    hf_model.forward = keeping  # type: ignore[method-assign, assignment]
    items = []
    for index, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        request = Request(request_id=f"r{index:04}", prompt_ids=(3,) * (chunk.start + chunk.num_tokens))
        runner.add(request, None)
        items.append(BatchItem(request.request_id, None, chunk.start, chunk.num_tokens, table, True))
    result = runner.run(Batch(Mode.UNMERGED, None, tuple(items)))
    if result.errors or not kept:
        raise RuntimeError(f"the batch did not run: {result.errors}")
    return kept[0]


HEADS, _SMALL_HEADS = Heads(28, 4, 128), Heads(4, 2, 16)
_BATCHES, CONTEXTS = (1, 8, 32), (512, 2048, 16_384)
_SMALL_BATCHES, _SMALL_CONTEXTS = (1, 4), (32, 96)
CHUNKS = tuple(Chunk(start, tokens) for tokens, start in itertools.product((512, 2048), (0, 8192)))
_SMALL_CHUNKS = (Chunk(0, 32), Chunk(48, 32))
CACHE_BYTES = 128 * 2**20  # more than any L2 cache: the layers together exceed it, as in a model
_MOST_LAYERS = 28
_LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_MOST_EXACT = 3  # requests of a batch that are compared with float64


def run(context: Context) -> dict[str, Any]:
    worst = _check(context)
    bytes_per_s = memory_speed(context)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, chunks in context.while_time(list(_cases(context)), 8.0):
            rows.append(_timed(context, name, chunks, bytes_per_s))
            context.keep({"errors": worst, "rows": rows})
    if not rows:
        raise TimeoutError("no time was left for a case")
    longest = rows[-1]
    return {
        "summary": f"relative error {max(worst.values()):.1e}; {longest['case']}: {longest['us']:.0f} us a layer, "
        f"bytes {longest['bytes us']:.0f}",
        "errors": worst,
        "rows": rows,
        "goals": goals_of(rows, context.gpu) if context.on_gpu else [],
        "bytes_per_s": bytes_per_s,
    }


def _cases(context: Context) -> Iterator[tuple[str, list[Chunk]]]:
    """Chunks first, then decode batches from short to long, with a ragged one before the longest."""
    large = context.on_gpu
    for chunk in CHUNKS if large else _SMALL_CHUNKS:
        yield f"chunk of {chunk.num_tokens} after {chunk.start}", [chunk]
    contexts = CONTEXTS if large else _SMALL_CONTEXTS
    batches = _BATCHES if large else _SMALL_BATCHES
    for length, batch in itertools.product(contexts, batches):
        if length == contexts[-1] and batch == batches[-1]:
            ragged = [Chunk(contexts[0] - 1, 1)] * (batch - 1) + [Chunk(contexts[-1] - 1, 1)]
            yield f"decode, batch {batch}, one of {contexts[-1]} and others of {contexts[0]}", ragged
        yield f"decode, batch {batch} x {length}", [Chunk(length - 1, 1)] * batch


def _check(context: Context) -> dict[str, float]:
    """Relative errors by case, of batches with ragged lengths, chunks and decode tokens together."""
    lengths = (1, 15, 16, 17, 130, 700, 2049) if context.on_gpu else (1, 15, 16, 17, 70)
    batches = {
        "decode": [Chunk(length - 1, 1) for length in lengths],
        "chunks": [Chunk(0, 33), Chunk(48, 17), Chunk(5, 64)],
        "together": [Chunk(16, 24), *(Chunk(length - 1, 1) for length in lengths)],
    }
    heads = HEADS if context.on_gpu else _SMALL_HEADS
    worst: dict[str, float] = {}
    with torch.inference_mode():
        for (name, chunks), dtype in itertools.product(batches.items(), _LARGEST_ERROR):
            batch = PagedBatch(chunks, heads, 2, dtype, context.device)
            error = max(_error(batch, index, layer=1) for index in range(len(chunks)))
            worst[f"{name}, {str(dtype).removeprefix('torch.')}"] = error
            if not error <= _LARGEST_ERROR[dtype]:
                raise ValueError(f"attention, {name} in {dtype}: relative error {error:.1e} against float64")
    return worst


def _error(batch: PagedBatch, index: int, layer: int) -> float:
    found = batch.attend(layer)
    first = sum(chunk.num_tokens for chunk in batch.chunks[:index])
    exact = batch.exact(index, layer)
    own = found[first : first + batch.chunks[index].num_tokens].double()
    return float((own - exact).norm() / exact.norm())


def _timed(context: Context, name: str, chunks: list[Chunk], bytes_per_s: float) -> dict[str, Any]:
    heads = HEADS if context.on_gpu else _SMALL_HEADS
    layers = _num_layers(context, chunks, heads)
    batch = PagedBatch(chunks, heads, layers, torch.bfloat16, context.device)
    seconds = device_seconds(context, batch.attend_all, layers)
    error = max(_error(batch, index, layers - 1) for index in range(min(_MOST_EXACT, len(chunks))))
    equal = len(set(chunks)) == 1
    theirs = device_seconds(context, _contiguous(batch), layers) if equal else None
    return {
        "case": name,
        "layers": layers,
        "us": 1e6 * seconds,
        "torch us": None if theirs is None else 1e6 * theirs,
        "bytes us": 1e6 * batch.kv_bytes / bytes_per_s,
        "error": error,
    }


def _num_layers(context: Context, chunks: list[Chunk], heads: Heads) -> int:
    if not context.on_gpu:
        return 2
    tokens = sum(chunk.start + chunk.num_tokens for chunk in chunks)
    return max(1, min(_MOST_LAYERS, CACHE_BYTES // (4 * tokens * heads.num_kv_heads * heads.head_dim)))


def _contiguous(batch: PagedBatch) -> Callable[[], None]:
    """Torch's attention of the same queries over the same KV, gathered beforehand, for requests of equal lengths."""
    chunk, number = batch.chunks[0], len(batch.chunks)
    heads = batch.heads
    q = batch.q[0].view(heads.num_heads, number, chunk.num_tokens, heads.head_dim).transpose(0, 1).contiguous()
    layers = []
    for layer in range(batch.num_layers):
        pairs = [batch.context_of(index, layer) for index in range(number)]
        k, v = (torch.stack(each).transpose(1, 2).contiguous() for each in zip(*pairs, strict=True))
        layers.append((k, v))
    causal = chunk.num_tokens > 1
    mask = None
    if causal and chunk.start:
        seen = torch.arange(chunk.start + chunk.num_tokens, device=q.device)
        mask = seen[None] <= chunk.start + torch.arange(chunk.num_tokens, device=q.device)[:, None]
    # Without cuDNN, which plans each new shape for a fraction of a second.
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def call() -> None:
        with sdpa_kernel(backends):
            for k, v in layers:
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=True
                )

    return call


_MOST_US: Mapping[str, Mapping[str, float]] = {
    "H100": {"batch 32 x 2048": 60.0, "batch 1 x 2048": 12.0, "batch 1 x 16384": 25.0},
    "H200": {
        "batch 32 x 2048": 42.0,
        "batch 1 x 2048": 12.0,
        "batch 1 x 16384": 12.0,
        "batch 32, one of 16384 and others of 512": 20.0,
    },
}
"""By GPU and case, of a layer."""


def goals_of(rows: list[dict[str, Any]], gpu: str) -> list[Goal]:
    us = {row["case"].removeprefix("decode, "): row["us"] for row in rows}
    limits = _MOST_US.get(gpu, {})
    goals = [Goal(f"decode, {case}, us a layer", us[case], limit, True) for case, limit in limits.items() if case in us]
    decodes = [row["us"] / row["torch us"] for row in rows if row["case"].startswith("decode") and row["torch us"]]
    return [*goals, Goal("decode / torch over contiguous KV, worst", max(decodes), 1.15, True)] if decodes else goals
