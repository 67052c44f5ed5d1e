"""A step between its launch and the moment when its results are known: its times and the tokens that it chooses."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from vlora.errors import BadRequest
from vlora.models.forward_batch import ForwardBatch
from vlora.models.gpu.step_inputs import StepTokens
from vlora.models.grammar import hold
from vlora.models.sampling import Written, adjusted, sample, token_scores
from vlora.types import Encoded, ErrorValue, HeadAnswer, TokenScore


class HostClock:
    """Marks points of a step's work, by the host's clock: for devices that compute in the call itself."""

    def mark(self) -> Any:
        """A mark after all work that was issued so far."""
        return time.perf_counter()

    def wait(self, mark: Any) -> None:
        """Wait until the work before a mark is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks, after `wait` for the second one."""
        return float(end - start)


class StreamClock(HostClock):
    """Marks points by events on the stream that runs the steps: a launch returns before the device computes it."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


@dataclasses.dataclass
class LaunchedStep:
    """A step that was launched and not yet collected; on a CPU it is complete.

    start, ready, encoded_by, end: marks of the clock before the switch, after it, after the encoding of images, and
    after the step. launched: see `StepResult`.
    """

    switched: bool
    in_place: bool
    encoded: Encoded | None
    errors: dict[str, ErrorValue]
    start: Any
    ready: Any
    encoded_by: Any
    end: Any = None
    choice: TokenChoice | None = None
    launched: bool = False
    heads: dict[str, HeadAnswer] = dataclasses.field(default_factory=dict)


class TokenChoice:
    """One token per text row of a launched step.

    Until `collect`, the last token of each row's request is -1 - row, a place in `StepTokens`.
    """

    def __init__(
        self, logits: torch.Tensor, packed: ForwardBatch, eos_ids: frozenset[int], on_device: StepTokens | None
    ) -> None:
        """Sample from logits, float32 [n, vocab]. on_device: keeps the tokens on a GPU; None on a CPU."""
        self._states = states = [row.state for row in packed.text]
        self._params = params = [state.request.sampling for state in states]
        written = [Written(own.tokens, len(own.request.prompt_ids)) for own in states]
        held, self._refused = hold(logits, [state.cursor for state in states])
        chosen = sample(
            adjusted(held, params, written, eos_ids),
            params,
            [state.seed for state in states],
            [state.num_answered for state in states],
            packed.draws,
        )
        self._chosen = chosen if on_device is None else on_device.keep(chosen)
        self._logits = logits if any(own.logprobs is not None for own in params) else None
        self._places = [len(state.tokens) for state in states]
        for row, state in enumerate(states):
            state.tokens.append(-1 - row)

    def collect(self) -> tuple[dict[str, int], dict[str, TokenScore], dict[str, ErrorValue]]:
        """After the step: by request id, its tokens, scores, and errors of answers that a grammar stopped."""
        chosen: list[int] = self._chosen.tolist()
        refused = self._refused
        ids = [state.request.request_id for state in self._states]
        for row, (state, place, token) in enumerate(zip(self._states, self._places, chosen, strict=True)):
            state.tokens[place] = token
            if state.cursor is not None and row not in refused:
                try:
                    state.cursor.advance(token)
                except BadRequest as error:
                    refused[row] = error
        scores = {} if self._logits is None else token_scores(self._logits, self._params, chosen)
        errors = {ids[row]: ErrorValue.of(error) for row, error in refused.items()}
        return dict(zip(ids, chosen, strict=True)), {ids[row]: score for row, score in scores.items()}, errors
