"""Logit adjustments before sampling: logit bias, penalties, and the minimum number of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from vlora.types import SamplingParams


class Written(NamedTuple):
    """One row's tokens so far: the prompt's, then the answer's. num_prompt: number of prompt tokens."""

    tokens: Sequence[int]
    num_prompt: int

    @property
    def answer(self) -> Sequence[int]:
        return self.tokens[self.num_prompt :]


def changes_logits(params: SamplingParams, num_answered: int) -> bool:
    """Whether `adjusted` changes the logits of the token at this index of the answer."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.min_tokens > num_answered
    )


def adjusted(
    logits: torch.Tensor, params: Sequence[SamplingParams], written: Sequence[Written], eos_ids: Collection[int]
) -> torch.Tensor:
    """Adjust `logits` [n, vocab] for sampling. Returns a copy if any row changes.

    The order is: minus infinity for end-of-sequence tokens (eos_ids) until the answer has `min_tokens`, the logit bias,
    the repetition penalty over prompt and answer, and the frequency and presence penalties over the answer. Logits of
    minus infinity do not change.
    """
    rows = [
        row
        for row, (asked, so_far) in enumerate(zip(params, written, strict=True))
        if changes_logits(asked, len(so_far.tokens) - so_far.num_prompt)
    ]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        _adjust(logits[row], params[row], written[row], eos_ids)
    return logits


def _adjust(logits: torch.Tensor, params: SamplingParams, written: Written, eos_ids: Collection[int]) -> None:
    """Adjust logits [vocab] in place."""
    if params.min_tokens > len(written.answer):
        logits[list(eos_ids)] = -torch.inf
    if params.logit_bias:
        ids, bias = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, _ids(ids, logits), torch.tensor(bias, dtype=logits.dtype, device=logits.device))
    if params.repetition_penalty != 1:
        seen = _ids(written.tokens, logits).unique()
        own = logits[seen]
        logits[seen] = torch.where(own > 0, own / params.repetition_penalty, own * params.repetition_penalty)
    if written.answer and (params.frequency_penalty or params.presence_penalty):
        seen, counts = _ids(written.answer, logits).unique(return_counts=True)
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _ids(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
