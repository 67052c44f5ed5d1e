"""The cost fit of `vlora bench policy`: the costs derived from an engine's steps."""

from __future__ import annotations

import random

import pytest
import torch

import atmm
from vlora.bench.dummy import small_config
from vlora.bench.scheduling.fit import StepSample, fit, fit_costs, patch_cost
from vlora.bench.scheduling.models import BenchModel
from vlora.orchestrator import Costs, StepSize, TokenThresholds

TRUE = Costs(
    base_s=0.1,
    token_s=1e-3,
    thin_token_s=4e-3,
    lane_s=8e-4,
    long_lane_s=2e-4,
    context_token_s=2e-6,
    adapter_s=4e-3,
    long_adapter_s=1.2e-2,
    short_lane=8,
    hidden_tokens=8,
    thin_tokens=24,
)


def some_size(draws: random.Random) -> StepSize:
    requests, merged = draws.randint(1, 32), draws.choice([None, "a0"])
    each = [1] * requests
    if draws.random() < 0.3:
        each[0] = draws.randint(50, 500)
    num_adapters = draws.randint(1, 8)
    items = [(f"a{draws.randrange(num_adapters)}", num_tokens) for num_tokens in each]
    return StepSize.holding(items, merged, draws.randint(0, 9000))


def test_linear_costs_are_recovered_from_noisy_samples() -> None:
    draws = random.Random(0)
    samples = [
        StepSample(size, TRUE.step_s(size) * draws.gauss(1, 0.02)) for size in (some_size(draws) for _ in range(300))
    ]
    found = fit_costs(samples, TRUE.thresholds)
    assert found[:8] == pytest.approx(TRUE[:8], rel=0.15, abs=1e-6)
    assert found.merge_s == found.back_s == 0


def test_decode_steps_weigh_as_much_as_prefill_steps() -> None:
    """A token costs less in a small step than in a large one. An error of a third of a decode step is negligible next
    to a prefill step, but most steps of a run are decode steps.
    """
    small, large = StepSize(16, (), 3200), StepSize(512, (), 0)
    samples = [StepSample(small, 0.1), StepSample(StepSize(32, (), 6400), 0.11)] * 3 + [StepSample(large, 1.0)] * 3
    found = fit_costs(samples, TokenThresholds(short_lane=8))
    assert found.step_s(small) == pytest.approx(0.1, rel=0.1)


def test_no_cost_is_negative() -> None:
    samples = [StepSample(StepSize(n, (), 0), 0.2 - 1e-4 * n) for n in (1, 100, 500)]
    assert min(fit_costs(samples, TokenThresholds(short_lane=8))) >= 0


@pytest.mark.slow
def test_every_kind_of_step_is_timed() -> None:
    model = BenchModel("small", small_config, 256 * 2**20)
    found = fit(model, torch.device("cpu"), decode_steps=1, batches=((1, 8), (4, 16)))
    sizes = {sample.size for sample in found.samples}
    prompts = {size.lanes for size in sizes if size.num_tokens == 64}
    assert {(), (16,) * 4, (32, 32)} <= prompts, "no lane, distinct adapters, shared adapters"
    assert (16, 16, 32) in prompts, "two requests with two lanes each and two merged ones, with a read of their adapter"
    assert StepSize(4 + 16, (), 4 * 17) in sizes, "a prompt joins four decoding requests"
    assert StepSize(4 + 16, (1, 1, 1, 17), 4 * 17) in sizes, "with a longer lane than theirs"
    assert found.costs.short_lane == atmm.longest_short_lane(torch.device("cpu"), torch.bfloat16)
    assert found.costs.thin_tokens == atmm.thin_batches(torch.empty(4, 4, dtype=torch.bfloat16)).max_tokens
    assert found.costs.base_s > 0 and found.costs.merge_s >= 0 and found.load_s >= 0  # small beside other processes
    assert found.costs.patch_s > 0 and len({size.num_patches for size in sizes if not size.num_tokens}) == 4


def test_the_patch_cost_weighs_small_and_large_pictures_equally() -> None:
    samples = [StepSample(StepSize(0, (), 0, n), 2e-3 * n) for n in (256.0, 5476.0)]
    assert patch_cost(samples) == pytest.approx(2e-3)
    assert Costs(patch_s=2e-3).step_s(samples[1].size) == pytest.approx(samples[1].seconds)
