"""Sampling, and the adjustments of logits before it: logit bias, penalties, and the minimum number of tokens.

A draw depends only on the request's seed and the token's index in the answer. The same request therefore gets the same
answer in any batch and after any preemption, without generator state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vlora.models.gpu.draw import draw
from vlora.types import SamplingParams, TokenScore

_FEW = 64  # tokens among which those that top-p keeps are searched first; then 64 times as many


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    places: Sequence[int],
    draws: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose one token per row: int64 [n], on the device of the logits.

    Args:
        logits: float32 [n, vocab], contiguous.
        places: Index of the token in each row's answer.
        draws: The rows' `draw_table` on the device of the logits. Used on a GPU only; None if all rows are greedy.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1) if draws is None else draw(logits, params, draws)
    rows = logits.numpy()  # on the host numpy's argmax is ten times as fast as torch's
    tokens = rows.argmax(-1)
    for row, own in enumerate(params):
        if own.temperature > 0:
            tokens[row] = _draw(rows[row], own, uniform(seeds[row], places[row]))
    return torch.from_numpy(tokens)


def uniform(seed: int, place: int) -> float:
    """The number in [0, 1) from which the token at this index of an answer is drawn."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=place)
    return float(np.random.Generator(bits).random())


def token_scores(
    logits: torch.Tensor, params: Sequence[SamplingParams], chosen: Sequence[int]
) -> dict[int, TokenScore]:
    """Log probabilities of the chosen and the most likely tokens, by row, for rows that ask for logprobs.

    They are computed from the given logits, before temperature and filters.
    """
    rows = [row for row, sampling in enumerate(params) if sampling.logprobs is not None]
    if not rows:
        return {}
    scores = torch.log_softmax(logits[rows].double(), -1)
    own = scores.gather(1, torch.tensor([[chosen[row]] for row in rows], device=scores.device)).squeeze(1).tolist()
    counts = [min(params[row].logprobs or 0, scores.shape[1]) for row in rows]
    values, ids = (part.tolist() for part in torch.topk(scores, max(counts)))
    return {
        row: TokenScore(own[i], tuple(zip(ids[i][: counts[i]], values[i][: counts[i]], strict=True)))
        for i, row in enumerate(rows)
    }


def _draw(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    """Invert the cumulative distribution, in the order of token ids, of the tokens that top-k, top-p and min-p keep.

    logits: float32 [vocab]. The order of the filters is that of transformers. Of equally likely tokens at a filter's
    border, those with smaller ids are kept. Tokens that a grammar forbids have no mass.
    """
    ids: np.ndarray | None = None  # of the kept tokens, ascending; None: all
    if 0 < params.top_k < len(logits):
        ids = _largest(logits, params.top_k)
        logits = logits[ids]
    values = torch.from_numpy(logits).double()
    masses = values.sub_(values.max()).div_(params.temperature).exp_().numpy()  # finite for any temperature
    if params.top_p < 1:
        heaviest = _heaviest(logits, masses, params.top_p * masses.sum())
        masses, ids = masses[heaviest], heaviest if ids is None else ids[heaviest]
    if params.min_p:
        likely = np.flatnonzero(~(masses < params.min_p))  # the largest mass is 1; NaN stays
        masses, ids = masses[likely], likely if ids is None else ids[likely]
    cumulative = torch.from_numpy(masses).cumsum(0).numpy()
    place = np.searchsorted(cumulative, number * cumulative[-1], side="right")
    place = min(place, np.searchsorted(cumulative, cumulative[-1]))  # the product may round to the total
    return int(place if ids is None else ids[place])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest values, ascending; of equal ones, those with smaller ids."""
    border = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(~(values < border))
    if len(ids) == count:
        return ids
    equal = values[ids] == border
    return ids[~equal | (np.cumsum(equal) <= count - np.count_nonzero(~equal))]


def _heaviest(logits: np.ndarray, masses: np.ndarray, limit: float) -> np.ndarray:
    """The ids, ascending, of tokens preceded by less than `limit`: by larger ones, and equal ones with smaller ids."""
    count = _FEW
    while count < len(masses):
        candidates = _largest(logits, count)
        if masses[candidates].sum() >= limit:
            return candidates[_heaviest(logits[candidates], masses[candidates], limit)]
        count *= _FEW
    order = np.argsort(-logits, kind="stable")
    cumulative = masses[order].cumsum()
    return np.sort(order[~(cumulative - masses[order] >= limit)])


# -- adjustments before sampling --------------------------------------------------------------------------------------


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
        for row, (sampling, so_far) in enumerate(zip(params, written, strict=True))
        if changes_logits(sampling, len(so_far.tokens) - so_far.num_prompt)
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
        own = logits[seen].double()
        penalized = torch.where(own > 0, own / params.repetition_penalty, own * params.repetition_penalty)
        # Finite, so that a token remains if all others are forbidden.
        logits[seen] = torch.where(own.isinf(), own, penalized.clamp(-3e38, 3e38)).to(logits.dtype)
    if written.answer and (params.frequency_penalty or params.presence_penalty):
        seen, counts = _ids(written.answer, logits).unique(return_counts=True)
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _ids(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
