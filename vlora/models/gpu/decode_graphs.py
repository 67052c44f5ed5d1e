"""Decode steps as CUDA graphs: the host launches one graph instead of several hundred kernels.

There is a graph for each number of rows in `sizes_up_to`, with and without lanes, for W0 and for merged weights. The
shadow of merged weights has the same addresses for every adapter, and lanes are contents of tables, so no graph depends
on the adapters that are loaded, merged or used (docs/decisions/0054).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

import atmm
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import ModeSwitcher
from vlora.models.forward_batch import ForwardBatch, Row
from vlora.models.gpu.decode_step import DecodeModel, DecodeStep
from vlora.models.gpu.step_inputs import StepInputs
from vlora.models.gpu.step_tokens import StepTokens

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
    """The graphs of all sizes, captured once at start. They share one pool of memory, so at most one runs at a time."""

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
    return row.stop - row.start == 1 and row.answers and row.state.request.head is None and is_text
