"""A packed batch over a paged KV cache with random content, for the attention of model layers by itself.

A model of the wanted heads, with all other sizes small, runs the batch once in the engine's runner, and the inputs of
its attention are kept. Then the attention function that is registered with transformers runs on them by itself, so that
this module depends on neither the kernels of a device nor on their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlora.bench.dummy import clip_config, llava_config
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
    """Of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Chunk(NamedTuple):
    """One request's share of the batch: `num_tokens` tokens after a context of `start` tokens."""

    start: int
    num_tokens: int


class PagedBatch:
    """Requests of the given lengths, with their blocks in random order.

    Args:
        chunks: One per request.
        heads: Shape of the layers.
        num_layers: Layers that share the batch; each has its own KV.
        dtype: Of queries and KV.
        device: Location.
    """

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
        """All layers, one after the other."""
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
