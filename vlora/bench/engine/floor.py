"""The floor of a decode step on a CPU: the time of the bytes that it must read and of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from atmm.processor import multiplies_bfloat16
from vlora.bench.engine.timed_engine import Step

_SIDE = 2048  # of the product of the operations: large enough for the processor's peak, small enough for its caches


class StepWork(NamedTuple):
    """The least work of a step. operations: a multiplication and an addition are two."""

    num_bytes: int
    operations: int


class DecodeWork:
    """The work of the decode steps of a model in bfloat16, from its shapes.

    Args:
        model: A model of transformers with a language model.
        shapes: (d_out, d_in) of each layer that an adapter changes, by name.
        context: Tokens that each request attends to.
    """

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, int]], context: int) -> None:
        # Layers, and the embedding as the output head.
        self._weights = sum(parameter.numel() for parameter in model.model.language_model.parameters())
        text = model.config.text_config
        width = text.hidden_size // text.num_attention_heads
        self._kv = 2 * text.num_hidden_layers * text.num_key_value_heads * width * context
        self._attended = 2 * text.num_hidden_layers * text.hidden_size * context  # multiplications, keys and values
        self._per_rank = sum(d_out + d_in for d_out, d_in in shapes.values())

    def __call__(self, batch: int, ranks: Sequence[int] = ()) -> StepWork:
        """The work of a step of `batch` requests, with an unmerged adapter of one request for each of the ranks."""
        adapters = sum(ranks) * self._per_rank
        return StepWork(
            num_bytes=2 * (self._weights + batch * self._kv + adapters),
            operations=2 * (batch * (self._weights + self._attended) + adapters),
        )


class FloorTimes(NamedTuple):
    """Measured times of a step's work, for each round of a comparison.

    Attributes:
        work: The work that was measured.
        reading: Seconds to read as many bytes.
        computing: Seconds of as many operations.
    """

    work: StepWork
    reading: Sequence[float]
    computing: Sequence[float]

    def floor(self) -> list[float]:
        """Seconds of a step that computes while it reads: the larger of both times."""
        return [max(pair) for pair in zip(self.reading, self.computing, strict=True)]

    def in_turn(self, work: StepWork | None = None) -> list[float]:
        """Seconds of a step that reads and computes in turn, of other work at the same speeds if given."""
        work = work or self.work
        more_bytes, more_operations = (new / measured for new, measured in zip(work, self.work, strict=True))
        return [
            more_bytes * read + more_operations * computed
            for read, computed in zip(self.reading, self.computing, strict=True)
        ]


def reading(work: StepWork) -> Step:
    """Reads the bytes of the work once, as fast as torch can."""
    values = torch.ones(work.num_bytes // 4)

    def step() -> None:
        values.sum()

    return step


def product_dtype() -> torch.dtype:
    """The type that this CPU multiplies fastest, of bfloat16 and float32."""
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def computing(work: StepWork) -> Step:
    """Does the operations of the work in one large product of torch, in the type that the processor multiplies best."""
    dtype = product_dtype()
    weight = torch.ones(_SIDE, _SIDE, dtype=dtype)
    x = torch.ones(max(1, work.operations // (2 * _SIDE * _SIDE)), _SIDE, dtype=dtype)

    @torch.inference_mode()
    def step() -> None:
        torch.nn.functional.linear(x, weight)

    return step
