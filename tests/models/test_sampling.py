"""Draws against a float64 reference; penalties, biases and filters against transformers; host and simulated GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from tests.example_counts import scaled
from tests.simulated_cuda import Kind, counting, simulated_cuda
from tests.simulated_cuda.counts import HOST_WAITS
from vlora.errors import BadRequest
from vlora.models import sampling
from vlora.models.gpu.draw import draw_table
from vlora.models.sampling import Written, adjusted, sample, uniform
from vlora.types import MAX_BIASED_TOKENS, MAX_GRAMMAR_CHARS, SamplingParams, seed_of


@pytest.fixture(autouse=True, scope="module")
def simulation() -> Iterator[None]:
    with simulated_cuda():
        yield


def drawn(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], places: Sequence[int]
) -> list[int]:
    """`sample`, with the parameters on the device of the logits."""
    uniforms = [uniform(seed, place) for seed, place in zip(seeds, places, strict=True)]
    table = torch.from_numpy(draw_table(params, uniforms)).pin_memory()
    return sample(logits, params, seeds, places, table.to(logits.device, non_blocking=True)).tolist()


def distribution(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The probability of every token [vocab], by the definition: sort, then top-k, top-p and min-p, one by one.

    Equally likely tokens are sorted by id.
    """
    largest = float(logits.max())
    values = [(float(logit) - largest) / params.temperature for logit in logits]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = order[: params.top_k or len(order)]
    masses = [math.exp(values[token] - values[order[0]]) for token in order]
    total = math.fsum(masses)
    probabilities = [0.0] * len(values)
    for place, token in enumerate(order):
        if math.fsum(masses[:place]) < params.top_p * total and masses[place] >= params.min_p:
            probabilities[token] = masses[place]
    kept = math.fsum(probabilities)
    return [probability / kept for probability in probabilities]


def assert_drawn(token: int, probabilities: list[float], draw: float) -> None:
    """Assert that `token` is the inverse of the cumulative distribution, in the order of ids, at `draw`."""
    below = math.fsum(probabilities[:token])
    assert probabilities[token] > 0
    assert below - 1e-12 <= draw <= below + probabilities[token] + 1e-12


# Few different values give ties, also between the tokens at a filter's border.
logits_with_ties = st.lists(st.sampled_from([-math.inf, -3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.0000002]), min_size=2)
logits_at_random = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([5e-324, 1e-308, 0.01, 0.7, 1.0, 5.0, 1e308]),
        "top_k": st.one_of(st.just(0), st.integers(1, 12)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0), st.sampled_from([5e-324, 0.25, 0.5, 0.75])),
        "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.just(1.0)),
    }
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@given(logits=st.one_of(logits_with_ties, logits_at_random), chosen=filters, seed=st.integers(0, 10))
@example(logits=[0.0, 0.0, 0.0, 0.0], chosen={"temperature": 1.0, "top_k": 2, "top_p": 1.0, "min_p": 0.0}, seed=0)
@example(logits=[0.0, 0.0, 0.0, 0.0], chosen={"temperature": 1.0, "top_k": 0, "top_p": 0.5, "min_p": 0.0}, seed=0)
@example(logits=[0.0, 1.0, 1.0, 0.0], chosen={"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 1.0}, seed=0)
@example(logits=[-0.0, 0.0, 0.0], chosen={"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}, seed=3)
def test_every_token_follows_the_definition(
    device: str, logits: list[float], chosen: dict[str, float], seed: int
) -> None:
    if max(logits) == -math.inf:
        logits = [*logits, 0.0]
    row, params = torch.tensor(logits, dtype=torch.float32), SamplingParams(**chosen)  # type: ignore[arg-type]
    probabilities = distribution(row, params)
    places = range(8)
    rows = row.expand(len(places), -1).contiguous().to(device)
    tokens = drawn(rows, [params] * len(places), [seed] * len(places), places)
    for place, token in zip(places, tokens, strict=True):
        assert_drawn(token, probabilities, uniform(seed, place))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "chosen", [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 100, "top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_frequencies_follow_the_definition(device: str, chosen: dict[str, float]) -> None:
    """Pearson's chi-square statistic over many draws, below its 0.9999 quantile."""
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 2
    params = SamplingParams(temperature=0.8, **chosen)  # type: ignore[arg-type]
    num_draws = scaled(4000)
    rows = logits.expand(200, -1).contiguous().to(device)
    tokens: list[int] = []
    for first in range(0, num_draws, 200):
        tokens += drawn(rows, [params] * 200, [11] * 200, range(first, first + 200))
    expected = np.array(distribution(logits, params)) * num_draws
    counts = np.bincount(tokens, minlength=500)
    assert not counts[expected == 0].any()
    common = expected >= 5
    rare = expected[~common].sum()
    statistic = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
    statistic += (counts[~common].sum() - rare) ** 2 / max(rare, 1.0)
    degrees = int(common.sum())
    assert statistic < degrees + 3.8 * (2 * degrees) ** 0.5 + 10


@pytest.mark.parametrize("vocab", [3, 1000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_host_and_device_draw_the_same_tokens(vocab: int) -> None:
    """With the same seeds, in batches of greedy and sampled rows with different filters."""
    options = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=20),
        SamplingParams(temperature=0.9, min_p=0.05),
        SamplingParams(temperature=3.0, top_k=2000, top_p=0.95, min_p=0.001),
        SamplingParams(temperature=30.0, top_p=0.99),
    ]
    logits = torch.randn(len(options), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    for place in range(6 if vocab < 60_000 else 2):
        seeds, places = [place + 100 * row for row in range(len(options))], [place] * len(options)
        here = sample(logits, options, seeds, places).tolist()
        assert here == drawn(logits.to("cuda"), options, seeds, places)
        for row, params in enumerate(options):
            assert here[row] == sample(logits[row : row + 1], [params], [seeds[row]], [place])[0]
            if params.temperature and vocab <= 1000:
                assert_drawn(here[row], distribution(logits[row], params), uniform(seeds[row], place))


def test_large_vocabularies_follow_the_definition() -> None:
    """The kept tokens of a top-p row are found among few candidates or many; both agree with the definition."""
    for scale, top_p in ((6.0, 0.9), (1.0, 0.5), (0.01, 0.99)):
        logits = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * scale
        values = logits.double()
        order = torch.argsort(values, descending=True, stable=True)
        masses = torch.softmax(values, 0)[order]
        before = masses.cumsum(0) - masses
        kept = torch.zeros(20_000, dtype=torch.float64)
        kept[order] = torch.where(before < top_p, masses, 0.0)
        cumulative = kept.cumsum(0) / kept.sum()
        for place in range(20):
            token = int(sample(logits[None], [SamplingParams(temperature=1.0, top_p=top_p)], [5], [place]))
            draw = uniform(5, place)
            below = float(cumulative[token] - kept[token] / kept.sum())
            assert kept[token] > 0 and below - 1e-9 <= draw <= float(cumulative[token]) + 1e-9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_undefined_logits_give_a_token_of_the_vocabulary(device: str, chosen: dict[str, float]) -> None:
    """A model that overflows answers nonsense; an id outside of the vocabulary would end a GPU's process."""
    params = SamplingParams(temperature=1.0, **chosen)  # type: ignore[arg-type]
    for logits in ([math.nan] * 5, [0.0, math.nan, 1.0, -math.inf, 2.0], [math.inf, 0.0, math.inf, 1.0, 2.0]):
        (token,) = drawn(torch.tensor([logits]).to(device), [params], [0], [0])
        assert 0 <= token < 5


def test_the_device_is_read_once() -> None:
    """One copy of the tokens to the host, and one asynchronous copy of the parameters, for any number of rows."""
    options = [SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)] * 8 + [SamplingParams()]
    logits = torch.randn(9, 50).to("cuda")
    with counting() as counts:
        drawn(logits, options, range(9), [0] * 9)
    assert counts.total(*HOST_WAITS) == counts.total(Kind.D2H) == 1, counts.report(*HOST_WAITS)
    assert counts.total(Kind.H2D_ASYNC) == 1


def test_greedy_rows_need_no_copy_to_the_device() -> None:
    logits = torch.randn(4, 50).to("cuda")
    with counting() as counts:
        assert sample(logits, [SamplingParams()] * 4, range(4), [0] * 4).tolist() == logits.cpu().argmax(-1).tolist()
    assert counts.total(Kind.H2D_ASYNC, Kind.H2D_BLOCKING) == 0
    assert counts.total(Kind.LAUNCH) == 1


# -- what changes logits before a draw ---------------------------------------------------------------------------------

VOCAB = 12
EOS = (3, 7)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def alone(logits: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> torch.Tensor:
    return adjusted(logits, [params], [Written(prompt + answer, len(prompt))], EOS)


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@given(st.integers(0, 99), token_lists.filter(len), token_lists, st.floats(0.3, 3))
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


@given(st.integers(0, 99), token_lists, token_lists, st.floats(-2, 2), st.floats(-2, 2))
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
    filters_of = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    logits = logits_of(seed)
    mixin: Any = GenerationMixin()
    warpers = mixin._get_logits_processor(GenerationConfig(do_sample=True, **filters_of))  # noqa: SLF001
    wanted = warpers(torch.LongTensor([[0]]), logits.double()).softmax(-1)[0]
    params = [SamplingParams(**filters_of)] * 64  # type: ignore[arg-type]
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
        *(({"max_tokens": count}, "max_tokens") for count in (-1, 0)),
        *(({"logprobs": count}, "logprobs") for count in (-1, 21)),
        ({"top_k": -2}, "top_k"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: Mapping[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field) as refused:
        SamplingParams(**fields)
    assert refused.value.field == field


def test_grammars_that_are_refused() -> None:
    with pytest.raises(BadRequest, match=f"at most {MAX_GRAMMAR_CHARS}"):
        SamplingParams(grammar="x" * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(BadRequest, match="ignore_eos"):
        SamplingParams(grammar="start: /a/", ignore_eos=True)


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
