"""Forward passes on buffers with fixed addresses, so that CUDA graphs can capture them.

Nothing that a step launches depends on a Python number that changes from step to step: a batch is padded to a fixed
number of rows, and tokens, contexts, adapters and their lanes are contents of buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

import atmm
from atmm.matmul import linear
from vlora.models.attention import KVCache, LayerTensors, StepAttention
from vlora.models.forward_batch import ForwardBatch
from vlora.models.gpu.attention import TABLE_COLUMNS, BlockDecodes, GpuAttention
from vlora.models.gpu.step_inputs import StepInputs
from vlora.models.hf_model import HFModel, VisualRows
from vlora.models.last_layer import LastLayer, lanes_of_rows

# Adapters with a higher rank have no lane in a captured step. Kernels skip the ranks that an adapter does not have.
HIGHEST_RANK = 64


@dataclasses.dataclass(frozen=True, slots=True)
class StepModel:
    """The parts of steps that all sizes share.

    Attributes:
        attention: Its attention kernels, which must serve decode tokens.
        max_batch, max_tokens: Most requests and tokens of a step.
        padding_block: A KV block that no request has. Padding rows read and write it.
    """

    hf_model: HFModel
    attention: GpuAttention
    cache: KVCache
    last_layer: LastLayer
    max_batch: int
    max_tokens: int
    max_context: int
    padding_block: int


class FixedStep:
    """The inputs of a step of up to `num_rows` tokens at fixed addresses, and what all kinds of steps do with them.

    Padding rows have token 0 and write the same KV row of `padding_block`. They have no lanes, and whatever they
    compute is in no other row.

    Attributes:
        token_ids, write_rows: int64 [num_rows] on the device, from the last `fill`.
        logits: float32 [n, vocab] on the device, from the last `compute`.
        plan: The lanes of a step with lanes. They are replaced by `plan.refill`.
    """

    def __init__(
        self, model: StepModel, num_rows: int, inputs: StepInputs, logits: torch.Tensor, num_lanes: int, num_more: int
    ) -> None:
        """Lay out the buffers of one size.

        Args:
            inputs: Copies the host arrays. All sizes may share it: their steps use it one after the other.
            num_lanes: Most lanes of a step.
            num_more: Bytes of further inputs.
        """
        self.num_rows, self.logits = num_rows, logits
        self.plan = atmm.SegmentPlan(num_rows, (), room=num_lanes, max_rank=HIGHEST_RANK)
        self._model, self._inputs = model, inputs
        wide = 8 * num_rows * (2 + (3 if model.hf_model.family.mrope else 1))
        self._host = np.zeros(wide + num_more, dtype=np.uint8)
        self._longs, self._more = self._host[:wide].view(np.int64).reshape(-1, num_rows), self._host[wide:]
        self._filled = num_rows  # rows of the last batch
        self._start_more()
        self._pad(0)
        on_device = inputs.first(self._host.nbytes)
        longs = on_device[:wide].view(torch.int64).view(-1, num_rows)
        self.token_ids, self.write_rows, self._positions = longs[0], longs[1], longs[2:]
        self._more_on_device = on_device[wide:]

    def _start_more(self) -> None:
        """Name the parts of `_more`, before they are copied for the first time."""

    def clear(self) -> None:
        """Copy a batch of padding rows only."""
        self._pad(0)
        self._inputs.put(self._host)
        self._inputs.copy()

    def _put(self, packed: ForwardBatch) -> None:
        """Add the inputs of a batch to the next copy; parts of `_more` are set before."""
        number = packed.num_tokens
        self._longs[0, :number], self._longs[1, :number] = packed.token_ids, packed.write_rows
        self._longs[2:, :number] = packed.positions(len(self._longs) - 2)
        self._pad(number)
        on_device = self._inputs.put(self._host)
        assert on_device.data_ptr() == self.token_ids.data_ptr(), "the inputs have moved"

    def _pad(self, first: int) -> None:
        """Make the rows from `first` on padding rows."""
        if first < self._filled:
            self._longs[:, first : self._filled] = 0
            self._longs[1, first : self._filled] = self._model.padding_block * self._model.attention.block_rows
        self._filled = first

    def _embedded(self) -> torch.Tensor:
        """The embeddings of the tokens, with those of the last step in their places."""
        self._inputs.tokens.fill(self.token_ids)
        embedded: torch.Tensor = self._model.hf_model.embed(self.token_ids)
        return embedded

    def _to_logits(self, hidden: torch.Tensor) -> None:
        head = self._model.hf_model.lm_head
        self.logits.copy_(linear(hidden, head.stored, head.bias))


class DecodeStep(FixedStep):
    """The step from token ids to logits, for up to `num_rows` requests with one token each.

    Padding rows are requests of one token in `padding_block`.
    """

    def __init__(self, model: StepModel, num_rows: int, inputs: StepInputs, logits: torch.Tensor) -> None:
        attention = model.attention
        columns = -(-model.max_context // (attention.block_size * TABLE_COLUMNS)) * TABLE_COLUMNS
        super().__init__(model, num_rows, inputs, logits, num_rows + 1, 4 * (1 + columns) * num_rows)
        lengths, tables = self._more_on_device.view(torch.int32).tensor_split([num_rows])
        places = torch.arange(num_rows, dtype=torch.int32, device=logits.device)
        decodes = BlockDecodes(
            places, lengths, tables.view(num_rows, columns), attention.block_rows, attention.block_size
        )
        self._step = StepAttention(model.cache, self.write_rows, [decodes], [decodes])

    @staticmethod
    def num_bytes(model: StepModel) -> int:
        """An upper bound of the bytes that a step puts into its inputs."""
        columns = model.max_context // model.attention.block_size + 1 + TABLE_COLUMNS
        return model.max_batch * (8 * 5 + 4 * (1 + columns) + 8 * 5) + 1024  # 5 longs, lengths, table, draws

    def _start_more(self) -> None:
        self._lengths, table = np.split(self._more.view(np.int32), [self.num_rows])
        self._table = table.reshape(self.num_rows, -1)
        self._tables: list[tuple[int, ...] | None] = [None] * self.num_rows  # in the rows of `_table`

    def fill(self, packed: ForwardBatch) -> None:
        """Copy a batch of single tokens, at most `num_rows`, and the sampling parameters of its requests."""
        self._lengths[: packed.num_tokens] = [row.last for row in packed.rows]
        for place, row in enumerate(packed.rows):
            blocks = row.state.block_table
            if self._tables[place] is not blocks:
                self._tables[place] = blocks
                self._table[place, : len(blocks)] = blocks
        self._put(packed)
        packed.draws = self._inputs.put_draws([row.state for row in packed.text])
        self._inputs.copy()

    def compute(self, *, lanes: bool) -> None:
        """Launch the step. lanes: add the deltas of the plan's lanes."""
        hf_model = self._model.hf_model
        embeddings = self._embedded()
        with hf_model.language_scope.replaced(self.plan if lanes else None):
            hidden = hf_model.forward(embeddings, self._positions, self._step)
        self._to_logits(hidden)

    def _pad(self, first: int) -> None:
        self._lengths[first : self._filled], self._table[first : self._filled, 0] = 1, self._model.padding_block
        self._tables[first:] = [None] * (self.num_rows - first)
        super()._pad(first)


class PromptBuffers:
    """Tensors of steps with prompt tokens that are read or written between graphs; steps of all sizes share them.

    Attributes:
        embeddings: The language model's inputs [rows, hidden], with the features of images in their places.
        hidden: Its final states [rows, hidden].
        q, out: Queries and results of the attention of a layer, [rows, heads, head_dim].
        new: Its keys and values, [rows, kv_heads * head_dim] each.
    """

    def __init__(self, hf_model: HFModel, num_rows: int) -> None:
        def rows(*shape: int) -> torch.Tensor:
            return torch.empty(num_rows, *shape, dtype=hf_model.dtype, device=hf_model.device)

        heads = hf_model.text_model.layers[0].self_attn.q_proj.out_features // hf_model.head_dim
        self.embeddings, self.hidden = rows(hf_model.hidden_size), rows(hf_model.hidden_size)
        self.q, self.out = rows(heads, hf_model.head_dim), rows(heads, hf_model.head_dim)
        self.new = rows(hf_model.kv_dim), rows(hf_model.kv_dim)


Cut = Callable[[Callable[[], None]], None]
"""Calls a function of the host, now and at each replay: what was launched before and follows is in two graphs."""


class PromptStep(FixedStep):
    """The step from token ids to hidden states and logits, for up to `num_rows` tokens of requests in any state.

    The host launches attention, whose layout differs from step to step, between two layers' graphs.

    Attributes:
        read_plan: The lanes of `plan` over the rows of the last layer that are read.
    """

    def __init__(
        self, model: StepModel, num_rows: int, inputs: StepInputs, logits: torch.Tensor, buffers: PromptBuffers
    ) -> None:
        """logits: for the most requests of a step. buffers: of at least `num_rows` rows."""
        self._num_read = len(logits)
        super().__init__(model, num_rows, inputs, logits, len(logits) + 1, 8 * 2 * self._num_read)
        more = self._more_on_device.view(torch.int64).view(2, -1)
        self._text_index, self._read_index = more[0], more[1]
        self.read_plan = atmm.SegmentPlan(self._num_read, (), room=len(logits) + 1, max_rank=HIGHEST_RANK)
        self._buffers = buffers

    @staticmethod
    def num_bytes(model: StepModel) -> int:
        """An upper bound of the bytes that a step puts into its inputs."""
        return 8 * (5 * model.max_tokens + 2 * model.max_batch)

    def _start_more(self) -> None:
        self._texts, self._reads = self._more.view(np.int64).reshape(2, -1)

    def limits(self, read: np.ndarray | None) -> bool:
        """Whether the last layer computes the rows that are read only. read: them, ascending; None: all."""
        return read is not None and len(read) <= self._num_read

    def fill(self, packed: ForwardBatch, read: np.ndarray | None) -> None:
        """Copy a batch of at most `num_rows` tokens."""
        self._texts[: len(packed.text)] = [row.stop - 1 for row in packed.text]
        if read is not None and self.limits(read):
            # Rows of the index that are left over are written to a row that is not read.
            unread = np.setdiff1d(np.arange(len(read) + 1), read)[0]
            self._reads[: len(read)], self._reads[len(read) :] = read, unread
        self._put(packed)
        self._inputs.copy()

    def set_lanes(self, lanes: Sequence[atmm.Lane], read: np.ndarray | None) -> None:
        """Replace the lanes. Raises ValueError for adapters that captured kernels cannot read."""
        self.plan.refill(lanes)
        if read is not None and self.limits(read):
            self.read_plan.refill(lanes_of_rows(lanes, read))

    def set_attention(self, step: StepAttention, visuals: VisualRows | None) -> None:
        """What the host launches in the next `compute` or replay."""
        self._attention, self._visuals = step, visuals

    def compute(self, cut: Cut, *, lanes: bool, limited: bool) -> None:
        """Launch the step.

        Args:
            lanes: Add the deltas of the plan's lanes.
            limited: Compute the rows in `fill`'s `read` only in the last layer.
        """
        hf_model, buffers = self._model.hf_model, self._buffers
        embeddings = buffers.embeddings[: self.num_rows]
        embeddings.copy_(self._embedded())
        cut(self._place_visuals)
        plan, read_plan = (self.plan, self.read_plan) if lanes else (None, None)
        read = self._read_index if limited else None
        with hf_model.language_scope.replaced(plan), self._model.last_layer.limited_to(read, read_plan):
            attention = _AttentionBetween(self._model.cache, self.write_rows, (), (), self, cut)
            hidden = hf_model.forward(embeddings, self._positions, attention)
        buffers.hidden[: self.num_rows].copy_(hidden)
        self._to_logits(hidden.index_select(0, self._text_index))

    def _place_visuals(self) -> None:
        if self._visuals is not None:
            self._visuals.place(self._buffers.embeddings)

    def tensors(self, layer: int, scale: float) -> LayerTensors:
        """The buffers of the attention of a layer."""
        buffers, rows, cache = self._buffers, self.num_rows, self._model.cache
        new = buffers.new[0][:rows], buffers.new[1][:rows]
        return LayerTensors(buffers.out[:rows], buffers.q[:rows], new, (cache.k[layer], cache.v[layer]), scale)

    def launch_attention(self, layer: int, tensors: LayerTensors) -> None:
        self._attention.launch(layer, tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class _AttentionBetween(StepAttention):
    """Lets the host launch the attention of each layer, on the buffers of a step."""

    step: PromptStep
    cut: Cut

    def attend(
        self, layer: int, q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], scale: float | None
    ) -> torch.Tensor:
        tensors = self.step.tensors(layer, q.shape[2] ** -0.5 if scale is None else scale)
        for target, source in zip((tensors.q, *tensors.new), (q, *new), strict=True):
            target.copy_(source)
        self.cut(lambda: self.step.launch_attention(layer, tensors))
        return tensors.out
