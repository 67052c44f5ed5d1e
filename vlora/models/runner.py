"""The only class that runs the model: takes a `Batch` and returns tokens and head answers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from msgspec.structs import replace

import atmm
from atmm.matmul import linear
from vlora.errors import EngineDead, StepFailed
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import ModeSwitcher
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.models.attention import KVCache, StepAttention
from vlora.models.forward_batch import ForwardBatch, lane_by_lane, queries_of
from vlora.models.gpu.attention import GpuAttention
from vlora.models.gpu.fixed_step import StepModel
from vlora.models.gpu.graphs import StepGraphs
from vlora.models.gpu.step_inputs import StepInputs, StepTokens
from vlora.models.grammar import Cursor
from vlora.models.head_reading import read_heads
from vlora.models.hf_model import HFModel
from vlora.models.last_layer import LastLayer, plan_of_rows
from vlora.models.launched_step import HostClock, LaunchedStep, StreamClock, TokenChoice
from vlora.models.request_state import RequestState
from vlora.models.vision.encoder import ImageEncoding, VisionEncoder
from vlora.parallel.process_group import CollectiveFailed, ProcessGroup
from vlora.types import Batch, BatchItem, Request, StepResult

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class ModelRunner:
    """Keeps each request's tensors by `request_id`, builds the packed batch, runs it, samples, and reads heads.

    Args:
        block_pages: Pages of one KV block, which determine the block's stride in KV rows.
        group: The ranks that run the same batches. Rank 0 samples; the other ranks get the tokens by `take_tokens`.
    """

    hf_model: HFModel
    arena: dataclasses.InitVar[Arena]
    pool: AdapterPool
    switcher: ModeSwitcher
    vision: dataclasses.InitVar[VisionEncoder]
    _: dataclasses.KW_ONLY
    block_size: int
    block_pages: dataclasses.InitVar[int]
    group: ProcessGroup | None = None

    def __post_init__(self, arena: Arena, vision: VisionEncoder, block_pages: int) -> None:
        hf_model, block_size = self.hf_model, self.block_size
        self._leads = self.group is None or self.group.leads
        self._block_rows = block_pages * PAGE_BYTES // (hf_model.kv_dim * hf_model.dtype.itemsize)
        self._cache = KVCache(arena.kv_matrix(hf_model.dtype, hf_model.kv_dim), hf_model.num_layers, block_size)
        self.gpu = GpuAttention.of(hf_model, block_size, self._block_rows)
        self._last_layer = LastLayer(hf_model.text_model.layers[hf_model.num_layers - 1], hf_model.language_scope)
        self._states: dict[str, RequestState] = {}
        self._images = ImageEncoding(hf_model, vision, self._states, self.group)
        self._clock = StreamClock() if hf_model.device.type == "cuda" else HostClock()
        self._tokens = StepTokens(hf_model.device) if hf_model.device.type == "cuda" else None
        self._inputs = None if self._tokens is None else StepInputs(hf_model.device, self._tokens)
        self.graphs: StepGraphs | None = None

    def capture(self, *sizes: int) -> None:
        """Run steps as CUDA graphs from now on. The arguments are those of `StepModel`."""
        assert self._inputs is not None
        model = StepModel(self.hf_model, self.gpu, self._cache, self._last_layer, *sizes)
        self.graphs = StepGraphs.try_to_capture(model, self.pool, self.switcher, self._inputs)

    def add(self, request: Request, vision_key: str | None) -> None:
        """Add a request. vision_key: its adapter's key if that adapter changes the vision side, else None."""
        self._states[request.request_id] = RequestState(request, vision_key, self.hf_model.placeholders)

    def begin_grammar(self, request_id: str, cursor: Cursor) -> None:
        """Constrain a request's answer to a grammar, before its first token."""
        self._states[request_id].cursor = cursor

    def release(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        self._images.release(request_id)
        self._states.pop(request_id, None)

    def take_tokens(self, tokens: Mapping[str, int]) -> None:
        """Append the tokens that rank 0 sampled in the last step, by request id."""
        for request_id, token in tokens.items():
            self._states[request_id].tokens.append(token)

    def run(self, batch: Batch) -> StepResult:
        """Launch one step and collect its result. Raises StepFailed as `launch` and `collect`."""
        return self.collect(self.launch(batch))

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start one step. A GPU may still be computing it when this returns.

        Raises:
            StepFailed: The switch or the forward pass failed. All requests of the batch, and no others, are lost.
        """
        start = self._clock.mark()
        what = f"switching the weights to {batch.merged_adapter or 'the base model'} failed"
        with _failing_its_batch(what), torch.no_grad():
            switched = self.switcher.switch(batch.merged_adapter)
        ready = self._clock.mark()
        with torch.inference_mode():
            encoded, errors = (None, {}) if batch.encode is None else self._images.advance(batch.encode)
            step = LaunchedStep(switched, self.switcher.in_place, encoded, errors, start, ready, self._clock.mark())
            errors |= self._images.prepare(batch.items)
            if items := [item for item in batch.items if item.request_id not in errors]:
                with _failing_its_batch():
                    packed = self._forward(batch, items, step)
                    if self._leads:
                        self._answer(packed, step)
        step.end = self._clock.mark()
        return step

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a step. A request that fails alone gets an error in the result; the others continue.

        Steps are collected in the order of their launches, each before the second step after it is launched. Raises
        StepFailed as `launch`.
        """
        with torch.inference_mode(), _failing_its_batch():
            self._clock.wait(step.end)
            tokens, scores, refused = ({}, {}, {}) if step.choice is None else step.choice.collect()
            seconds = self._clock.seconds
            return StepResult(
                tokens=tokens,
                scores=scores,
                heads=step.heads,
                errors=step.errors | refused,
                step_s=seconds(step.ready, step.end),
                switch_s=seconds(step.start, step.ready),
                switched=step.switched,
                in_place=step.in_place,
                launched=step.launched,
                encoded=step.encoded and replace(step.encoded, seconds=seconds(step.ready, step.encoded_by)),
            )

    # -- the packed batch -------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch, items: Sequence[BatchItem], step: LaunchedStep) -> ForwardBatch:
        """Run the model: sets `hidden` of the batch, or its `logits`."""
        hf_model, merged = self.hf_model, batch.merged_adapter
        packed = ForwardBatch(self._states, lane_by_lane(items, merged), self.block_size, self._block_rows)
        lanes = packed.lanes(batch.mode, merged)
        if self.graphs is not None and self.graphs.replay(packed, lanes, step):
            return packed
        step.launched = self.graphs is not None
        self.switcher.show()
        put = torch.from_numpy if self._inputs is None else self._inputs.put
        token_ids, write_rows = put(packed.token_ids), put(packed.write_rows)
        positions = put(packed.positions(3 if hf_model.family.mrope else 1))
        if self._leads and atmm.gains_from_copies(lanes, hf_model.device, hf_model.dtype):
            self.pool.pack_for(lane.key for lane in lanes)
        queries, last_queries, rows = queries_of(packed, hf_model.dtype, self.gpu, put)
        read = (None,) if rows is None else (put(rows), plan_of_rows(lanes, rows))
        packed.text_index = put(np.array([row.stop - 1 for row in packed.text], dtype=np.int64))
        visuals = packed.visuals(put)
        if self._inputs is not None:
            self._inputs.finish(packed, token_ids)
        embeddings = packed.inputs = hf_model.embed(token_ids)
        if hf_model.own.embedding:
            hf_model.own.embedding.look_up(embeddings, token_ids, packed.rows)
        if visuals is not None:
            visuals.place(embeddings)
        attention = StepAttention(self._cache, write_rows, queries, last_queries)
        with hf_model.language_scope.lanes(packed.num_tokens, lanes), self._last_layer.limited_to(*read):
            packed.hidden = hf_model.forward(embeddings, positions, attention, visuals)
        return packed

    def _answer(self, packed: ForwardBatch, step: LaunchedStep) -> None:
        if packed.logits is None and packed.text:
            picked, head = packed.hidden.index_select(0, packed.text_index), self.hf_model.lm_head
            packed.logits = linear(picked, head.stored, head.bias).float().contiguous()
            if self.hf_model.own.head:
                self.hf_model.own.head.multiply(packed.logits, picked, [row.adapter for row in packed.text])
        if packed.logits is not None:
            step.choice = TokenChoice(packed.logits, packed, self.hf_model.eos_ids, self._tokens)
        if packed.head_rows:
            step.heads, failed = read_heads(packed, self.pool, self.hf_model.config)
            step.errors |= failed


@contextlib.contextmanager
def _failing_its_batch(what: str = "the batch failed inside the model") -> Iterator[None]:
    """Any error fails only its batch; the engine continues."""
    try:
        yield
    except (CollectiveFailed, EngineDead):
        raise  # not an error of this batch
    except Exception as error:
        log.exception("step failed")
        raise StepFailed(f"{what}: {type(error).__name__}: {error}") from error
