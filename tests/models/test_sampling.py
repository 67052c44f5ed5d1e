"""Logit bias, penalties, min_tokens, and all filters, checked against transformers' logits processors; seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from tests.example_counts import scaled
from tests.simulated_cuda import simulated_cuda
from vlora.errors import BadRequest
from vlora.models import sampling
from vlora.models.gpu.draw import draw_table
from vlora.models.sampling import Written, adjusted
from vlora.types import MAX_BIASED_TOKENS, SamplingParams, seed_of

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


@pytest.mark.parametrize("answered", range(4))
def test_min_tokens_are_those_of_transformers(answered: int) -> None:
    logits, prompt, answer = logits_of(answered), [1, 2], [5] * answered
    for least in range(6):
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@settings(max_examples=scaled(40))
@given(
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.integers(0, VOCAB),
    top_p=st.just(1.0) | st.floats(0.01, 1),
    min_p=st.just(0.0) | st.floats(0.01, 1),
)
def test_all_filters_together_keep_the_tokens_that_transformers_keeps(
    device: str, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """In the order in which its generation applies them."""
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    logits = logits_of(seed)
    mixin: Any = GenerationMixin()
    warpers = mixin._get_logits_processor(GenerationConfig(do_sample=True, **filters))  # noqa: SLF001
    wanted = warpers(torch.LongTensor([[0]]), logits.double()).softmax(-1)[0]
    params = [SamplingParams(**filters)] * 64  # type: ignore[arg-type]
    uniforms = [(place + 0.5) / 64 for place in range(64)]
    rows = logits.expand(64, -1).contiguous()
    with simulated_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "uniform", lambda seed, place: uniforms[place])
        table = torch.from_numpy(draw_table(params, uniforms)).to(device)
        drawn = sampling.sample(rows.to(device), params, [0] * 64, range(64), table).tolist()
    assert drawn == torch.searchsorted(wanted.cumsum(0), torch.tensor(uniforms).double()).tolist()


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-9, 1e9, 1e300])
def test_an_extreme_repetition_penalty_leaves_numbers(penalty: float) -> None:
    """The only allowed token remains allowed, whatever it is multiplied by."""
    for own in (-3.0, -0.0, 0.0, 1e-30, 3.0, -1e38, 1e38):
        logits = torch.tensor([[-torch.inf, own, -torch.inf]])
        for bias in ((), ((1, 100.0),), ((1, -100.0),)):
            params = SamplingParams(temperature=1.0, repetition_penalty=penalty, logit_bias=bias)
            found = alone(logits, params, [0, 1, 2], [])
            assert found.isfinite().tolist() == [[False, True, False]] and found[0, 0] == -torch.inf
            assert int(sampling.sample(found, [params], [0], [0])) == 1


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"min_p": 1.5}, "min_p"),
        *(({name: float("nan")}, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *(({name: float("inf")}, name) for name in ("temperature", "top_p", "min_p", "frequency_penalty")),
        ({"temperature": -1e-308}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
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


def test_a_draw_depends_on_the_seed_and_the_place_which_the_request_id_decides_otherwise() -> None:
    """`test_draws.py` compares draws with the definition, alone and in batches."""
    params, logits = [SamplingParams(temperature=5.0)] * 50, logits_of(0).expand(50, -1).contiguous()
    first, second, placed = (
        sampling.sample(logits, params, [seed] * 50, places).tolist()
        for seed, places in ((1, range(50)), (2, range(50)), (1, [0] * 50))
    )
    assert first != second and len(set(first)) > 1 and len(set(placed)) == 1
    assert seed_of("a", SamplingParams()) == seed_of("a", SamplingParams()) != seed_of("b", SamplingParams())
    assert seed_of("a", SamplingParams(seed=5)) == 5
