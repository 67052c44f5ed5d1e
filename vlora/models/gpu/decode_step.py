"""The forward pass of decode tokens on buffers with fixed addresses, so that a CUDA graph can capture it.

Nothing that it launches depends on a Python number that changes from step to step: a batch is padded to a fixed number
of rows, and contexts, adapters and their lanes are contents of buffers.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

import atmm
from atmm.matmul import linear
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import ModeSwitcher
from vlora.models.attention import KVCache, StepAttention
from vlora.models.forward_batch import ForwardBatch, Row
from vlora.models.gpu.attention import TABLE_COLUMNS, BlockDecodes, GpuAttention
from vlora.models.gpu.step_inputs import StepInputs
from vlora.models.gpu.step_tokens import StepTokens
from vlora.models.hf_model import HFModel

# Adapters with a higher rank have no lane in a captured step. Kernels skip the ranks that an adapter does not have.
_HIGHEST_RANK = 64


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeModel:
    """The parts of decode steps that all sizes share.

    Attributes:
        attention: Its attention kernels, which must serve decode tokens.
        padding_block: A KV block that no request has. Padding rows read and write it.
    """

    hf_model: HFModel
    attention: GpuAttention
    cache: KVCache
    max_context: int
    padding_block: int


class DecodeStep:
    """The step from token ids to logits, for up to `num_rows` requests with one token each.

    Padding rows are requests of one token in `padding_block`. They write the same KV row and have no lanes; whatever
    they compute is in no other row.

    Attributes:
        token_ids: int64 [num_rows] on the device, from the last `fill`.
        logits: float32 [num_rows, vocab] on the device, from the last `compute`.
        plan: The lanes of a step with lanes. They are replaced by `plan.refill`.
    """

    def __init__(self, model: DecodeModel, num_rows: int, inputs: StepInputs, logits: torch.Tensor) -> None:
        """Lay out the buffers of one size.

        Args:
            inputs: Copies the host arrays. All sizes may share it: their steps use it one after the other.
        """
        self.num_rows, self.logits = num_rows, logits
        self.plan = atmm.SegmentPlan(num_rows, (), room=num_rows + 1, max_rank=_HIGHEST_RANK)
        self._model, self._inputs = model, inputs
        attention = model.attention
        num_positions = 3 if model.hf_model.family.mrope else 1
        wide = 8 * (2 + num_positions) * num_rows
        columns = -(-model.max_context // (attention.block_size * TABLE_COLUMNS)) * TABLE_COLUMNS
        self._host = np.zeros(wide + 4 * (1 + columns) * num_rows, dtype=np.uint8)
        self._longs = self._host[:wide].view(np.int64).reshape(-1, num_rows)
        self._lengths, table = np.split(self._host[wide:].view(np.int32), [num_rows])
        self._table = table.reshape(num_rows, columns)
        on_device = self.clear()
        longs = on_device[:wide].view(torch.int64).view(-1, num_rows)
        lengths, tables = on_device[wide:].view(torch.int32).tensor_split([num_rows])
        self.token_ids, write_rows, self._positions = longs[0], longs[1], longs[2:]
        places = torch.arange(num_rows, dtype=torch.int32, device=logits.device)
        decodes = BlockDecodes(
            places, lengths, tables.view(num_rows, columns), attention.block_rows, attention.block_size
        )
        self._step = StepAttention(model.cache, write_rows, [decodes], [decodes])

    @staticmethod
    def num_bytes(model: DecodeModel, num_rows: int) -> int:
        """An upper bound of the bytes that a step of this size puts into its inputs."""
        columns = model.max_context // model.attention.block_size + 1 + TABLE_COLUMNS
        return num_rows * (8 * 5 + 4 * (1 + columns) + 8 * 5) + 1024  # 5 values of 8 bytes each, lengths, table, draws

    def clear(self) -> torch.Tensor:
        """Copy a batch of padding rows only. Returns the buffer on the device."""
        self._pad(0)
        on_device = self._inputs.put(self._host)
        self._inputs.copy()
        return on_device

    def fill(self, packed: ForwardBatch) -> None:
        """Copy a batch of single tokens, at most `num_rows`, and the sampling parameters of its requests."""
        number = packed.num_tokens
        block_size, block_rows = self._model.attention.block_size, self._model.attention.block_rows
        self._longs[0, :number], self._longs[1, :number] = packed.token_ids, packed.write_rows
        self._longs[2:, :number] = packed.positions(len(self._positions))
        for place, row in enumerate(packed.rows):
            blocks = row.context[::block_size] // block_rows
            self._lengths[place], self._table[place, : len(blocks)] = len(row.context), blocks
        self._pad(number)
        on_device = self._inputs.put(self._host)
        assert on_device.data_ptr() == self.token_ids.data_ptr(), "the inputs have moved"
        packed.draws = self._inputs.put_draws([row.state for row in packed.text])
        self._inputs.copy()

    def compute(self, *, lanes: bool) -> None:
        """Launch the step. lanes: add the deltas of the plan's lanes."""
        hf_model = self._model.hf_model
        self._inputs.tokens.fill(self.token_ids)
        embeddings = hf_model.embed(self.token_ids)
        with hf_model.language_scope.replaced(self.plan if lanes else None):
            hidden = hf_model.forward(embeddings, self._positions, self._step, None, ())
        self.logits.copy_(linear(hidden, hf_model.lm_head.stored, hf_model.lm_head.bias))

    def _pad(self, first: int) -> None:
        """Make the rows from `first` on padding rows."""
        block = self._model.padding_block
        self._longs[:, first:] = 0
        self._longs[1, first:] = block * self._model.attention.block_rows
        self._lengths[first:], self._table[first:, 0] = 1, block


log = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """merged: whether the weights are those of the shadow. lanes: whether deltas are added. num_rows: with padding."""

    merged: bool
    lanes: bool
    num_rows: int


def sizes_up_to(max_batch: int) -> list[int]:
    """Numbers of rows, ascending: 1, 2, 4, 8, 12, 16, then multiples of 8, and last `max_batch`."""
    sizes = [1, 2, 4, 8, 12, *range(16, max_batch, 8)]
    return [*(size for size in sizes if size < max_batch), max_batch]


class DecodeGraphs:
    """Decode steps as CUDA graphs: the host launches one graph instead of several hundred kernels.

    There is a graph for each number of rows in `sizes_up_to`, with and without lanes, for W0 and for merged weights.
    The shadow of merged weights has the same addresses for every adapter, and lanes are contents of tables, so no
    graph depends on the adapters that are loaded, merged or used (docs/decisions/0054). All are captured once at start
    and share one pool of memory, so at most one runs at a time.
    """

    def __init__(
        self, model: DecodeModel, pool: AdapterPool, switcher: ModeSwitcher, tokens: StepTokens, max_batch: int
    ) -> None:
        """Capture all graphs, with nothing merged.

        Args:
            tokens: The tokens of the last step. They get room for `max_batch`, and must not move afterwards.
        """
        self._pool, self._switcher = pool, switcher
        self._sizes = sizes_up_to(max_batch)
        hf_model = model.hf_model
        tokens.reserve(max_batch)
        inputs = StepInputs(hf_model.device, tokens, DecodeStep.num_bytes(model, max_batch))
        logits = torch.empty(max_batch, hf_model.lm_head.out_features, dtype=torch.float32, device=hf_model.device)
        self.steps = {size: DecodeStep(model, size, inputs, logits[:size]) for size in self._sizes}
        self._refused: set[str] = set()  # reasons why lanes were computed without a graph, to log each once
        started = time.perf_counter()
        self._graphs = self._captured(hf_model.device)
        self.seconds = time.perf_counter() - started
        log.info("captured %d CUDA graphs in %.1f s", len(self._graphs), self.seconds)

    @classmethod
    def try_to_capture(
        cls, model: DecodeModel, pool: AdapterPool, switcher: ModeSwitcher, tokens: StepTokens, max_batch: int
    ) -> DecodeGraphs | None:
        """The graphs, or None, with a warning in the log, if a model or a device does not allow the capture."""
        try:
            return cls(model, pool, switcher, tokens, max_batch)
        except RuntimeError as error:
            # The traceback has the first error: torch reports the end of a failed capture after it.
            log.warning("decode steps run without CUDA graphs, because the capture failed: %s", error, exc_info=True)
            return None

    def replay(self, packed: ForwardBatch, lanes: Sequence[atmm.Lane]) -> bool:
        """Compute `packed.logits` by a graph; they are valid until the next replay.

        Returns False, with nothing computed, if no graph computes this step.
        """
        if not all(map(_decodes, packed.rows)) or packed.num_tokens > self._sizes[-1]:
            return False
        step = self.steps[self._sizes[bisect.bisect_left(self._sizes, packed.num_tokens)]]
        if lanes and not self._use_lanes(step, lanes):
            return False
        merged = self._switcher.merged_key
        if merged is not None and self._pool.has_own_layers(merged):
            return False
        step.fill(packed)
        shadow = merged is not None and not self._switcher.in_place
        self._graphs[GraphKey(shadow, bool(lanes), step.num_rows)].replay()
        packed.logits = step.logits[: packed.num_tokens]
        return True

    def _use_lanes(self, step: DecodeStep, lanes: Sequence[atmm.Lane]) -> bool:
        if not all(self._pool.is_plain(lane.key) for lane in lanes):
            return False
        try:
            step.plan.refill(lanes)
        except ValueError as error:  # an adapter that the captured kernels cannot read
            if str(error) not in self._refused:
                self._refused.add(str(error))
                log.warning("decode steps with some adapters run without CUDA graphs: %s", error)
            return False
        return True

    def _captured(self, device: torch.device) -> dict[GraphKey, torch.cuda.CUDAGraph]:
        graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        serving, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(serving)
        memory = torch.cuda.graph_pool_handle()
        weights = (False,) if self._switcher.in_place else (False, True)
        with torch.cuda.stream(stream):
            for size, merged, lanes in itertools.product(reversed(self._sizes), weights, (False, True)):
                step, graph = self.steps[size], torch.cuda.CUDAGraph()
                step.clear()
                with self._switcher.shown(merged=merged), torch.inference_mode():
                    step.compute(lanes=lanes)  # compiles kernels, and allocates what all graphs of the size share
                    # Other threads may use the device meanwhile, to load adapters.
                    with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
                        step.compute(lanes=lanes)
                graphs[GraphKey(merged, lanes, size)] = graph
        serving.wait_stream(stream)
        return graphs


def _decodes(row: Row) -> bool:
    """Whether a row is a single token with an embedding of the model's table, from which a token is sampled."""
    visual = row.state.visual
    is_text = visual is None or row.first >= len(visual.before) - 1
    return row.stop - row.start == 1 and row.answers and not row.state.request.in_one_pass and is_text
