"""Logit bias, penalties and min_tokens, checked against transformers' logits processors and the definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from vlora.errors import BadRequest
from vlora.models.sampling import Written, adjusted, sample
from vlora.types import MAX_BIASED_TOKENS, SamplingParams

VOCAB = 12
EOS = (3, 7)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def alone(logits: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> torch.Tensor:
    return adjusted(logits, [params], [Written(prompt + answer, len(prompt))], EOS)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@given(st.integers(0, 99), tokens.filter(len), tokens, st.floats(0.3, 3))
def test_repetition_penalty_is_that_of_transformers(
    seed: int, prompt: list[int], answer: list[int], penalty: float
) -> None:
    logits = logits_of(seed)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())
    torch.testing.assert_close(alone(logits, SamplingParams(repetition_penalty=penalty), prompt, answer), wanted)


@given(st.integers(0, 99), tokens.filter(len), tokens, st.integers(0, 10))
def test_min_tokens_are_those_of_transformers(seed: int, prompt: list[int], answer: list[int], least: int) -> None:
    logits = logits_of(seed)
    oracle = MinNewTokensLengthLogitsProcessor(len(prompt), least, list(EOS), device="cpu")
    wanted = oracle(torch.tensor([prompt + answer]), logits.clone())
    torch.testing.assert_close(alone(logits, SamplingParams(min_tokens=least), prompt, answer), wanted)


@given(st.integers(0, 99), tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_penalties_are_those_of_their_definition(
    seed: int, prompt: list[int], answer: list[int], frequency: float, presence: float
) -> None:
    logits = logits_of(seed)
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    wanted = logits.clone()
    for token in range(VOCAB):
        wanted[0, token] -= frequency * answer.count(token) + presence * (token in answer)
    torch.testing.assert_close(alone(logits, params, prompt, answer), wanted)


def test_bias_is_added_once_per_token() -> None:
    logits = logits_of(0)
    found = alone(logits, SamplingParams(logit_bias=((2, 5.0), (9, -100.0))), [1], [])
    wanted = logits.clone()
    wanted[0, 2] += 5
    wanted[0, 9] -= 100
    torch.testing.assert_close(found, wanted)


def test_forbidden_tokens_stay_forbidden() -> None:
    logits = logits_of(0)
    logits[0, :6] = -torch.inf
    params = SamplingParams(
        logit_bias=((1, 100.0),), repetition_penalty=0.5, frequency_penalty=-2, presence_penalty=-2, min_tokens=1
    )
    assert alone(logits, params, [1, 2], [])[0, :6].isneginf().all()
    assert alone(logits, params, [1, 2], [3])[0, :6].isneginf().all()


def test_rows_do_not_change_each_other() -> None:
    logits = logits_of(1, rows=3)
    params = [SamplingParams(), SamplingParams(presence_penalty=2), SamplingParams(min_tokens=1)]
    written = [Written([1, 2], 1), Written([1, 2], 1), Written([1, 2], 1)]
    found = adjusted(logits, params, written, EOS)
    assert torch.equal(found[0], logits[0]) and torch.equal(found[2], logits[2])
    assert (found[1] != logits[1]).nonzero().tolist() == [[2]]
    same = [params[0], params[2]]
    assert adjusted(logits[:2], same, written[:2], EOS) is not logits
    assert adjusted(logits[:2], [SamplingParams()] * 2, written[:2], EOS).data_ptr() == logits.data_ptr()


@given(st.integers(0, 99), st.floats(0.01, 1), st.floats(0.2, 4))
def test_min_p_keeps_the_same_tokens_as_transformers(seed: int, min_p: float, temperature: float) -> None:
    logits = logits_of(seed)
    left = MinPLogitsWarper(min_p)(torch.LongTensor([[0]]), logits.double() / temperature)
    params = SamplingParams(temperature=temperature, min_p=min_p)
    drawn = {int(sample(logits, [params], [0], [place])) for place in range(200)}
    assert drawn <= set((left[0] > -torch.inf).nonzero().flatten().tolist())
    if min_p == 1:
        assert drawn == {int(logits.argmax())}


def test_min_p_is_applied_before_top_p() -> None:
    """top_p applies to the probabilities that min_p keeps: 0.5 and 0.3 of 0.8 are 0.625 and 0.375."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    both = SamplingParams(temperature=1.0, min_p=0.4, top_p=0.6)
    assert {sample(logits, [both], [0], [place]).item() for place in range(100)} == {0}
    top_p_alone = SamplingParams(temperature=1.0, top_p=0.6)
    assert {sample(logits, [top_p_alone], [0], [place]).item() for place in range(100)} == {0, 1}


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 0.0),) * (MAX_BIASED_TOKENS + 1)}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 1, "grammar": "start: /a/"}, "min_tokens"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: Mapping[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field) as refused:
        SamplingParams(**fields)
    assert refused.value.field == field
