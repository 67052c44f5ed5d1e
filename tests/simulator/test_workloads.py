"""Workloads have the rates, shares and shapes of their names; recorded traffic is read, or refused with the field."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from pathlib import Path

import pytest

from vlora.errors import BadConfig
from vlora.simulator.arrivals import Arrival, hottest, power_law, punica
from vlora.simulator.workloads import WORKLOADS, make_workload, read_trace


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
        ("gamma:rate=nan", "rate is 'nan'; it must be a number"),
        ("hottest:skew=1.5", "at most 1"),
        ("hottest:prompt_min=500", "prompt_min .500. is above prompt_max"),
        ("punica:pattern=odd", "choose one of distinct"),
        ("video:streams=0", "streams is 0"),
        ("video:streams=2.5", "streams is '2.5'; it must be a whole number"),
    ],
)
def test_invalid_settings_are_reported_by_name(text: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        make_workload(text)


# -- recorded traffic -------------------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def trace(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "trace.csv"


def test_azure_traces_are_read_with_relative_times(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.4799600,110,27")
    first, second = read_trace(path, 1, 0)
    assert first == Arrival(0.0, "adapter-0", 4808, 10)
    assert second.time_s == pytest.approx(0.5) and second[2:7] == (110, 27, None, 0, None)


def test_named_adapters_are_kept_and_others_drawn_reproducibly(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + ",Adapter", "5,10,0,gate", "5.5,10,3,")
    assert list(read_trace(path, 9, 0)) == [Arrival(0.0, "gate", 10, 0), Arrival(0.5, None, 10, 3)]
    path = trace(tmp_path, HEADER, *(f"{i},10,3" for i in range(50)))
    drawn = list(read_trace(path, 9, 0))
    assert drawn == list(read_trace(path, 9, 0)) and len({a.adapter for a in drawn}) > 3


def test_optional_columns_are_read(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + ",Adapter,MaxTTFT,Priority,Tenant", "5,10,3,gate,0.5,-2,north", "6,10,3,gate,,,")
    assert [arrival[4:7] for arrival in read_trace(path, 1, 0)] == [(0.5, -2, "north"), (None, 0, None)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["TIMESTAMP,ContextTokens", "1,2"], "line 1: no column GeneratedTokens"),
        ([HEADER, "1,2,3", "soon,2,3"], "line 3, field TIMESTAMP: 'soon'"),
        ([HEADER, "5,2,3", "4,2,3"], "line 3, field TIMESTAMP: '4' is earlier"),
        ([HEADER, "1,0,3"], "line 2, field ContextTokens: '0'"),
        ([HEADER, "1,2,-3"], "line 2, field GeneratedTokens: '-3'"),
        ([HEADER, "1,2"], "line 2, field GeneratedTokens: None"),
        ([HEADER + ",MaxTTFT", "1,2,3,0"], "line 2, field MaxTTFT: '0' is not above 0"),
        ([HEADER + ",MaxTTFT", "1,2,3,soon"], "line 2, field MaxTTFT is 'soon'"),
        ([HEADER + ",Priority", "1,2,3,11"], "line 2, field Priority: '11'"),
        ([HEADER + ",Priority", "1,2,3,0.5"], "line 2, field Priority: '0.5'"),
        ([HEADER + ",Adapter", "1,2,0,"], "line 2, field GeneratedTokens: 0 requests a task head"),
    ],
)
def test_an_invalid_line_is_reported_with_its_field(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        list(read_trace(trace(tmp_path, *lines), 1, 0))
    with pytest.raises(BadConfig, match="No such file"):
        list(read_trace(tmp_path / "none.csv", 1, 0))
