"""The tokens that a step chooses: sampled when it is launched, appended to their requests when they are known."""

from __future__ import annotations

import torch

from vlora.errors import BadRequest
from vlora.models.forward_batch import ForwardBatch
from vlora.models.gpu.step_tokens import StepTokens
from vlora.models.grammar import hold
from vlora.models.sampling import Written, adjusted, sample, token_scores
from vlora.types import ErrorValue, TokenScore


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
