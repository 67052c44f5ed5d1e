"""Images are simulated work with a cost, and do not cause other requests to be refused or delayed."""

from __future__ import annotations

import random

import pytest

from vlora.orchestrator import Costs
from vlora.orchestrator.encoder_budget import SHARE
from vlora.simulator import Arrival, ReplicaConfig, replay
from vlora.simulator.replica import Replica
from vlora.types import RequestOutput

COSTS = Costs(base_s=0.05, token_s=0.001, context_token_s=1e-6, patch_s=2e-4)


def with_pictures(rate: float, number: int, seed: int, bound_s: float | None, share: float) -> list[Arrival]:
    """Text requests over four adapters; a share of them has an image that takes 0.4 to 1.5 s to encode."""
    draws = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(number):
        now += draws.expovariate(rate)
        images = (round(draws.uniform(0.4, 1.5) / COSTS.patch_s),) if draws.random() < share else ()
        adapter = f"adapter-{draws.randrange(4)}"
        arrivals.append(Arrival(now, adapter, draws.randint(64, 192), draws.randint(8, 48), bound_s, images=images))
    return arrivals


def answers(arrivals: list[Arrival]) -> dict[int, RequestOutput]:
    """The last output of each request, by number."""
    replica = Replica(ReplicaConfig(costs=COSTS, load_s=0.0))
    finished: list[RequestOutput] = []
    for number, arrival in enumerate(arrivals):
        finished += replica.run_until(arrival.time_s)
        replica.wait_until(arrival.time_s)
        replica.add(str(number), arrival)
    finished += replica.run_until(float("inf"))
    return {int(output.request_id): output for output in finished}


def capacity(seed: int) -> float:
    """Requests per second when all arrive at once."""
    arrivals = with_pictures(1e6, 300, seed, None, 0.05)
    return len(arrivals) / replay(arrivals, ReplicaConfig(costs=COSTS)).end_s


@pytest.mark.slow
@pytest.mark.parametrize("bound_s", [1.0, 2.0, 4.0])
def test_text_requests_that_would_be_in_time_are_not_refused(bound_s: float) -> None:
    num_pictures = num_wrong_pictures = 0
    for seed in range(3):
        rate = 0.3 * capacity(seed)
        unbounded = answers(with_pictures(rate, 600, seed, None, 0.05))
        arrivals = with_pictures(rate, 600, seed, bound_s, 0.05)
        bounded = answers(arrivals)
        assert len(bounded) == len(arrivals)
        first_s = {number: output.timings.ttft_s for number, output in unbounded.items() if output.timings is not None}
        refused = [number for number, output in bounded.items() if output.error is not None]
        would_be_late = [number for number, seconds in first_s.items() if seconds is None or seconds > bound_s]
        wrongly = [number for number in refused if number not in would_be_late]
        wrong_texts = [number for number in wrongly if not arrivals[number].images]
        # Unpredictable bursts remain: two texts in 5,000, at the tightest bound.
        assert len(wrong_texts) <= (2 if bound_s == 1.0 else 0)
        num_pictures += sum(bool(arrival.images) for arrival in arrivals)
        num_wrong_pictures += len(wrongly) - len(wrong_texts)
    # Some 30 images per seed are too few for a share: all three seeds together.
    assert num_pictures > 75 and num_wrong_pictures <= num_pictures // 3


def test_an_image_extends_steps_by_at_most_the_encode_share() -> None:
    replica = Replica(ReplicaConfig(costs=COSTS))
    for number in range(8):
        replica.add(f"text {number}", Arrival(0.0, None, 16, 400))
    steps: list[tuple[float, bool]] = []
    for number in range(150):
        if number == 30:
            for picture in range(10):
                replica.add(f"picture {picture}", Arrival(replica.clock.now, None, 400, 1, images=(5476,)))
        started = replica.clock.now
        batch = replica.decide()
        assert batch is not None
        replica.record(batch)
        if number > 5 and batch.num_tokens == len(batch.items) == 8:
            steps.append((replica.clock.now - started, batch.encode is not None))
    with_images = [seconds for seconds, encodes in steps if encodes]
    without = [seconds for seconds, encodes in steps if not encodes]
    assert len(with_images) > 50 and max(with_images) <= (1 + SHARE) * max(without) * 1.05
    assert replica.stats().num_encoded_patches > 1000


def test_images_cost_their_patches_and_cached_ones_nothing() -> None:
    def took(images: tuple[int, ...]) -> float:
        return replay([Arrival(0.0, None, 100, 1, images=images)], ReplicaConfig(costs=COSTS)).end_s

    assert took((1000, 500)) == pytest.approx(took(()) + 1500 * COSTS.patch_s)
    assert took((0, 0)) == took(())


def test_the_cost_of_a_patch_is_learned_separately() -> None:
    replica = Replica(ReplicaConfig(costs=COSTS))
    for number, arrival in enumerate(with_pictures(2.0, 200, 0, None, 0.3)):
        replica.run_until(arrival.time_s)
        replica.wait_until(arrival.time_s)
        replica.add(str(number), arrival)
    replica.run_until(float("inf"))
    learned = replica.scheduler.costs
    assert learned.patch_s == pytest.approx(COSTS.patch_s, rel=1e-6)
    assert learned.base_s + 100 * learned.token_s == pytest.approx(COSTS.base_s + 100 * COSTS.token_s, rel=0.05)
