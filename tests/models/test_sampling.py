"""Sampling: greedy, filters, and draws that depend only on the seed and the token's index."""

from __future__ import annotations

import pytest
import torch

from vlora.models.sampling import sample
from vlora.types import SamplingParams, seed_of

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, 3.0]])


def draws(params: SamplingParams, count: int, seed: int = 0) -> list[int]:
    return [int(sample(LOGITS, [params], [seed], [place])) for place in range(count)]


def test_temperature_zero_is_greedy() -> None:
    assert draws(SamplingParams(), 3) == [4, 4, 4]


@pytest.mark.slow
def test_frequencies_follow_the_probabilities() -> None:
    count = 4000
    got = torch.bincount(torch.tensor(draws(SamplingParams(temperature=1.0), count)), minlength=5) / count
    assert torch.allclose(got, torch.softmax(LOGITS[0], -1), atol=0.03)


def test_low_temperature_sharpens() -> None:
    assert draws(SamplingParams(temperature=0.05), 50) == [4] * 50


def test_top_k_and_top_p_leave_the_likeliest() -> None:
    assert set(draws(SamplingParams(temperature=5.0, top_k=2), 200)) == {0, 4}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.5), 200)) == {4}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.85), 200)) == {0, 4}


def test_a_draw_does_not_depend_on_the_batch() -> None:
    params = SamplingParams(temperature=1.0)
    alone = sample(LOGITS, [params], [7], [3])
    batch = torch.cat([torch.randn(1, 5), LOGITS, torch.randn(1, 5)])
    together = sample(batch, [params, params, SamplingParams()], [1, 7, 2], [0, 3, 9])
    assert together[1] == alone[0]


def test_seeds_and_places_give_different_draws() -> None:
    params = SamplingParams(temperature=5.0)
    assert draws(params, 50, seed=1) != draws(params, 50, seed=2)
    assert len(set(draws(params, 50))) > 1


def test_without_a_seed_the_request_id_decides() -> None:
    assert seed_of("a", SamplingParams()) == seed_of("a", SamplingParams()) != seed_of("b", SamplingParams())
    assert seed_of("a", SamplingParams(seed=5)) == 5
