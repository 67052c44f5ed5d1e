"""Workloads have the rates, shares and shapes of their names, and are equal for equal seeds."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from vlora.errors import BadConfig
from vlora.simulator import WORKLOADS, Arrival, make_workload
from vlora.simulator.popularity import hottest, power_law, punica


def take(text: str, num_requests: int = 4000, num_adapters: int = 10, seed: int = 0) -> list[Arrival]:
    return list(make_workload(text).arrivals(num_requests, num_adapters, seed))


def shares(arrivals: list[Arrival]) -> list[float]:
    """Shares of the adapters, the hottest first."""
    return [count / len(arrivals) for _, count in Counter(a.adapter for a in arrivals).most_common()]


@pytest.mark.parametrize("name", WORKLOADS)
def test_arrivals_are_ordered_reproducible_and_lazy(name: str) -> None:
    arrivals = take(name, 500)
    assert len(arrivals) == 500 and arrivals == take(name, 500)
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(arrivals))
    assert next(make_workload(name).arrivals(10**12, 10, 0)).time_s >= 0


@pytest.mark.parametrize("cv", [0.5, 1, 3])
def test_gamma_has_the_given_rate_and_burstiness(cv: float) -> None:
    arrivals = take(f"gamma:rate=5,cv={cv}", 20_000, 1)
    gaps = [b.time_s - a.time_s for a, b in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.15)


def test_gamma_adapters_follow_the_power_law() -> None:
    found = shares(take("gamma:alpha=1", 20_000, 4))
    assert found == pytest.approx(power_law(4, 1.0), abs=0.02)


def test_the_hottest_adapter_has_its_share() -> None:
    found = shares(take("hottest:skew=0.6", 20_000, 5))
    assert found == pytest.approx([0.6, 0.1, 0.1, 0.1, 0.1], abs=0.02)
    assert hottest(2, 0.2) == [0.5, 0.5] and hottest(1, 0.9) == [1.0]


def test_punica_has_its_four_patterns() -> None:
    assert len(shares(take("punica:pattern=distinct", 100))) == 100
    assert len(punica("uniform", 100) or ()) == 10
    assert shares(take("punica:pattern=identical", 100)) == [1.0]
    skewed = punica("skewed", 1000)
    assert skewed is not None and skewed[0] / skewed[1] == pytest.approx(1.5) and sum(skewed) == pytest.approx(1)


def test_each_video_stream_sends_one_chunk_per_second() -> None:
    arrivals = take("video:streams=3", 30, 3)
    for stream in {a.adapter for a in arrivals}:
        times = [a.time_s for a in arrivals if a.adapter == stream]
        assert [b - a for a, b in itertools.pairwise(times)] == pytest.approx([1.0] * 9)
    assert {(a.prompt_tokens, a.answer_tokens) for a in arrivals} == {(6 * 256, 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("storm", "no workload named 'storm'"),
        ("gamma:rat=2", "has no setting 'rat=2'"),
        ("gamma:rate", "has no setting 'rate'"),
        ("gamma:rate=fast", "rate is 'fast'"),
        ("gamma:rate=0", "rate is 0.0"),
        ("gamma:rate=nan", "rate is nan"),
        ("hottest:skew=1.5", "at most 1"),
        ("hottest:prompt_min=500", "prompt_min .500. is above prompt_max"),
        ("punica:pattern=odd", "choose one of distinct"),
        ("video:streams=0", "streams is 0"),
    ],
)
def test_invalid_settings_are_reported_by_name(text: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        make_workload(text)
