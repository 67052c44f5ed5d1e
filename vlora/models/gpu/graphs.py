"""Steps as CUDA graphs: decode steps as one graph, steps with prompt tokens as graphs between which attention is
launched.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import atmm
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import ModeSwitcher
from vlora.models.attention import StepAttention
from vlora.models.forward_batch import ForwardBatch, Row, queries_of
from vlora.models.gpu.fixed_step import HIGHEST_RANK, DecodeStep, PromptBuffers, PromptStep, StepModel
from vlora.models.gpu.step_inputs import StepInputs
from vlora.models.launched_step import LaunchedStep

log = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """merged: whether the weights are those of the shadow. lanes: whether deltas are added. num_rows: with padding.

    limited: whether the last layer computes some rows only; never for decode steps.
    """

    merged: bool
    lanes: bool
    num_rows: int
    limited: bool = False


def sizes_up_to(max_batch: int) -> list[int]:
    """Numbers of rows, ascending: 1, 2, 4, 8, 12, 16, then multiples of 8, and last `max_batch`."""
    sizes = [1, 2, 4, 8, 12, *range(16, max_batch, 8)]
    return [*(size for size in sizes if size < max_batch), max_batch]


def buckets_up_to(max_tokens: int) -> list[int]:
    """Numbers of rows of steps with prompt tokens, ascending: 32, 64, then four between doublings, last `max_tokens`.

    From 128 tokens on, at most a fifth of a step is padding.
    """
    sizes, size = [32, 64], 128
    while size < max_tokens:
        sizes += range(size, 2 * size, size // 4)
        size *= 2
    return [*(each for each in sizes if each < max_tokens), max_tokens]


class Pieces:
    """A step as CUDA graphs with launches by the host between them. Its first run has no graphs: it compiles kernels.

    Args:
        memory, stream: Of all captures.
    """

    def __init__(self, memory: Any, stream: torch.cuda.Stream) -> None:
        self._memory, self._stream = memory, stream
        self._parts: list[tuple[torch.cuda.CUDAGraph, Callable[[], None]]] = []
        self._graph: torch.cuda.CUDAGraph | None = None  # that is captured now
        self._failure: Exception | None = None
        self._is_compiled = False

    def run(self, compute: Callable[[], None]) -> None:
        """Launch the step: by replays, if it was captured."""
        for graph, between in self._parts:
            graph.replay()
            between()
        if not self._parts:
            compute()
            self._is_compiled = True

    @property
    def is_captured(self) -> bool:
        return bool(self._parts)

    def capture(self, compute: Callable[[], None]) -> None:
        """Capture the step if it has run, which runs nothing.

        Raises:
            Exception: A model or a device does not allow this.
        """
        if not self._is_compiled:
            return
        if self._failure is not None:
            raise self._failure
        with torch.cuda.stream(self._stream):
            try:
                self._begin()
                compute()
                self._end(lambda: None)
            except Exception as error:
                self._failure = error
                with contextlib.suppress(RuntimeError):
                    if self._graph is not None:
                        self._graph.capture_end()
                self._parts.clear()
                raise
            finally:
                self._graph = None

    def cut(self, between: Callable[[], None]) -> None:
        """See `vlora.models.gpu.fixed_step.Cut`."""
        if self._graph is None:
            between()
        else:
            self._end(between)
            self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, to load adapters.
        self._graph.capture_begin(self._memory, capture_error_mode="thread_local")

    def _end(self, between: Callable[[], None]) -> None:
        assert self._graph is not None
        graph, self._graph = self._graph, None
        graph.capture_end()
        self._parts.append((graph, between))


class StepGraphs:
    """Steps as CUDA graphs: the host launches few graphs instead of several hundred kernels.

    There is a graph of decode steps for each number of rows in `sizes_up_to`, with and without lanes, for W0 and for
    merged weights, captured once at start. Steps with prompt tokens have graphs for each number of rows in
    `buckets_up_to`, captured when such a step runs for the second time (docs/decisions/0108). The shadow of merged
    weights has the same addresses for every adapter, and lanes are contents of tables, so no graph depends on the
    adapters that are loaded, merged or used (docs/decisions/0054). All share one pool of memory, so at most one runs at
    a time.
    """

    def __init__(self, model: StepModel, pool: AdapterPool, switcher: ModeSwitcher, inputs: StepInputs) -> None:
        """Capture the graphs of decode steps, with nothing merged.

        Args:
            inputs: Copies what the host launches between graphs. The tokens of the last step get room for the largest
                batch, and must not move afterwards.
        """
        self._model, self._pool, self._switcher = model, pool, switcher
        max_batch, hf_model = model.max_batch, model.hf_model
        self._sizes, self._buckets = sizes_up_to(max_batch), buckets_up_to(model.max_tokens)
        inputs.tokens.reserve(max_batch)
        most = max(DecodeStep.num_bytes(model), PromptStep.num_bytes(model))
        self._between, self._inputs = inputs, StepInputs(hf_model.device, inputs.tokens, most)
        shape = max_batch, hf_model.lm_head.out_features
        self._logits = torch.empty(shape, dtype=torch.float32, device=hf_model.device)
        self.steps = {size: DecodeStep(model, size, self._inputs, self._logits[:size]) for size in self._sizes}
        self.prompts: dict[int, PromptStep] = {}
        self.buffers = PromptBuffers(hf_model, self._buckets[-1])
        self.pieces: dict[GraphKey, Pieces] = {}
        self._logged: set[str] = set()  # reasons why steps were computed without a graph
        self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(hf_model.device)
        started = time.perf_counter()
        self._graphs = self._captured()
        switcher.shows_late = True
        self.seconds = time.perf_counter() - started
        log.info("captured %d CUDA graphs in %.1f s", len(self._graphs), self.seconds)

    @classmethod
    def try_to_capture(
        cls, model: StepModel, pool: AdapterPool, switcher: ModeSwitcher, inputs: StepInputs
    ) -> StepGraphs | None:
        """The graphs, or None, with a warning in the log, if a model or a device does not allow the capture."""
        try:
            return cls(model, pool, switcher, inputs)
        except RuntimeError as error:
            # The traceback has the first error: torch reports the end of a failed capture after it.
            log.warning("steps run without CUDA graphs, because the capture failed: %s", error, exc_info=True)
            return None

    def replay(self, packed: ForwardBatch, lanes: Sequence[atmm.Lane], launched: LaunchedStep) -> bool:
        """Compute a step by graphs: its `logits`, and with prompt tokens `inputs` and `hidden`, until the next one.

        Returns False, with nothing computed and the reason in the log, if no graph computes this step.
        """
        decodes = packed.num_tokens <= self._sizes[-1] and all(map(_decodes, packed.rows))
        try:
            if packed.num_tokens > self._buckets[-1]:
                raise _NoGraphError(f"they have more than {self._buckets[-1]} tokens")
            merged = self._switcher.merged_key
            if reason := self._pool.unfit_for_graphs({lane.key for lane in lanes}, merged, HIGHEST_RANK):
                raise _NoGraphError(reason)
            if decodes:
                self._decode(packed, lanes)
            else:
                self._compute(packed, lanes, launched)
        except _NoGraphError as error:
            if str(error) not in self._logged:
                self._logged.add(str(error))
                log.warning("some steps run without CUDA graphs: %s", error)
            return False
        return True

    def _shows_shadow(self) -> bool:
        return self._switcher.merged_key is not None and not self._switcher.in_place

    def _decode(self, packed: ForwardBatch, lanes: Sequence[atmm.Lane]) -> None:
        step = self.steps[self._sizes[bisect.bisect_left(self._sizes, packed.num_tokens)]]
        with _no_graph_on(ValueError):  # an adapter that the captured kernels cannot read
            if lanes:
                step.plan.refill(lanes)
        step.fill(packed)
        self._graphs[GraphKey(self._shows_shadow(), bool(lanes), step.num_rows)].replay()
        packed.logits = step.logits[: packed.num_tokens]

    def _compute(self, packed: ForwardBatch, lanes: Sequence[atmm.Lane], launched: LaunchedStep) -> None:
        """Compute a step with prompt tokens."""
        step, model, inputs = self._prompt_step(packed.num_tokens), self._model, self._between
        visuals = packed.visuals(inputs.put)
        if visuals is not None and visuals.levels:
            raise _NoGraphError("features of images are added in several layers")
        queries, last_queries, read = queries_of(packed, model.hf_model.dtype, model.attention, inputs.put)
        limited = step.limits(read)
        key = GraphKey(self._shows_shadow(), bool(lanes), step.num_rows, limited)
        pieces = self.pieces.get(key)
        if pieces is None:
            pieces = self.pieces[key] = Pieces(self._memory, self._stream)
        with _no_graph_on(ValueError):
            if lanes:
                step.set_lanes(lanes, read)
        compute = functools.partial(step.compute, pieces.cut, lanes=bool(lanes), limited=limited)
        step.fill(packed, read)
        launched.launched = not pieces.is_captured  # or captured now, which takes as long
        if not pieces.is_captured:
            self._switcher.show()
            with _no_graph_on(Exception):
                pieces.capture(compute)
        packed.draws = inputs.put_draws([row.state for row in packed.text])
        inputs.copy()
        step.set_attention(StepAttention(model.cache, step.write_rows, queries, last_queries), visuals)
        pieces.run(compute)
        buffers, number = self.buffers, packed.num_tokens
        packed.inputs, packed.hidden = buffers.embeddings[:number], buffers.hidden[:number]
        packed.logits = step.logits[: len(packed.text)] if packed.text else None

    def _prompt_step(self, num_tokens: int) -> PromptStep:
        size = self._buckets[bisect.bisect_left(self._buckets, num_tokens)]
        if size not in self.prompts:
            logits = self._logits[: min(size, len(self._logits))]
            self.prompts[size] = PromptStep(self._model, size, self._inputs, logits, self.buffers)
        return self.prompts[size]

    def _captured(self) -> dict[GraphKey, torch.cuda.CUDAGraph]:
        graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        stream = self._stream
        serving = torch.cuda.current_stream(self._logits.device)
        stream.wait_stream(serving)
        weights = (False,) if self._switcher.in_place else (False, True)
        with torch.cuda.stream(stream):
            for size, merged, lanes in itertools.product(reversed(self._sizes), weights, (False, True)):
                step, graph = self.steps[size], torch.cuda.CUDAGraph()
                step.clear()
                self._switcher.show(merged=merged)
                with torch.inference_mode():
                    step.compute(lanes=lanes)  # compiles kernels, and allocates what all graphs of the size share
                    # Other threads may use the device meanwhile, to load adapters.
                    with torch.cuda.graph(graph, self._memory, stream, capture_error_mode="thread_local"):
                        step.compute(lanes=lanes)
                graphs[GraphKey(merged, lanes, size)] = graph
        serving.wait_stream(stream)
        return graphs


class _NoGraphError(Exception):
    """Why no graph computes a step."""


@contextlib.contextmanager
def _no_graph_on(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        raise _NoGraphError(str(error)) from error


def _decodes(row: Row) -> bool:
    """Whether a row is a single token with an embedding of the model's table, from which a token is sampled."""
    visual = row.state.visual
    is_text = visual is None or row.first >= len(visual.before) - 1
    return row.stop - row.start == 1 and row.answers and not row.state.request.in_one_pass and is_text
