"""Draws against a literal float64 reference of the distribution, on the host and on the (simulated) device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.simulated_cuda import Kind, counting, simulated_cuda
from tests.simulated_cuda.counts import HOST_WAITS
from vlora.models.gpu.draw import draw_table
from vlora.models.sampling import sample, uniform
from vlora.types import SamplingParams


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
