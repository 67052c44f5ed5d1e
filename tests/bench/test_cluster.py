"""`vlora bench cluster`: its measures and goals on small inputs; the whole bench runs by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from vlora.bench.cluster import consolidation, decisions, growing, placing, scale
from vlora.bench.cluster.plots import draw
from vlora.bench.cluster.rows import drifting, rising_and_falling, row
from vlora.routing import RULES
from vlora.simulator.measures import Sample


def test_idle_time_counts_after_a_minute() -> None:
    """Samples every ten seconds: one replica is idle for 50 s, then for 70 s; the other always works."""
    busy = [1] + [0] * 5 + [1] + [0] * 7
    samples = [Sample(10.0 * place, {"a": size, "b": 1}, 0) for place, size in enumerate(busy)]
    assert consolidation.idle_share(samples) == pytest.approx(7 / (2 * len(busy)))


def test_the_rate_rises_and_falls() -> None:
    times = [arrival.time_s for arrival in rising_and_falling(20.0, 600.0)]
    thirds = [sum(low <= time_s < low + 200 for time_s in times) for low in (0, 200, 400)]
    assert times == sorted(times) and times[-1] <= 600
    assert thirds[1] > 1.6 * max(thirds[0], thirds[2])
    assert sum(thirds) == pytest.approx(20 * 600 * 2 / 3.14159, rel=0.05), "the mean of a sine's half wave"


def test_popularity_drifts() -> None:
    """The most popular adapter of a period is not always the same one."""
    arrivals = list(drifting(20.0, 12_000, 16, seed=0))
    hottest = set()
    for _, period in itertools.groupby(arrivals, key=lambda arrival: arrival.time_s // 120):
        names = [arrival.adapter for arrival in period]
        hottest.add(max(set(names), key=names.count))
    assert 1 < len(hottest) < 5


def test_goals_compare_the_rules() -> None:
    hour = [
        row(consolidation.PART, consolidation.MAIN, rule=rule, active=active, batch=batch)
        for rule, active, batch in (("punica", 3.0, 25.0), ("least_loaded", 15.0, 4.0))
    ]
    assert [(goal.value, goal.holds) for goal in consolidation.goals(hour)] == [(0.2, True), (25.0, True)]
    drift = [
        row(placing.PART, placing.MAIN, rule=rule, loads=loads, ttft_p99_s=late)
        for rule, loads, late in (("placed", 300, 0.9), ("least_loaded", 1000, 1.0))
    ]
    assert [goal.holds for goal in placing.goals(drift)] == [False, False]
    grown = [row(growing.WORKERS, "", N=number, req_per_s=rate) for number, rate in ((1, 6.0), (2, 12.0), (4, 20.0))]
    grown += [row(growing.ADAPTERS, f"{n} adapters", rule="placed", latency_s=3.0) for n in (20, 2000)]
    assert [goal.holds for goal in growing.goals(grown)] == [True, False, True]


def test_a_process_of_its_own_reports_its_memory() -> None:
    found = scale.measure(4, 200, "placed")
    assert found["case"] == "200 requests" and found["N"] == 4 and found["MiB"] > 10 and found["CPU s"] > 0


def test_plots_are_drawn(tmp_path: Path) -> None:
    values = {"req_per_s": 2.0, "loads": 30, "ttft_p99_s": 0.5, "latency_s": 3.0, "p50_us": 9.0, "p99_us": 20.0}
    samples = [[0, 3], [2, 4], [1, 0]]
    rows = [row(consolidation.PART, consolidation.MAIN, rule=rule, samples=samples) for rule in RULES]
    rows += [row(placing.PART, placing.MAIN, rule=rule, **values) for rule in RULES]
    rows += [row(placing.VARIANTS, f"{placing.MAIN}; no plan", rule="placed", **values)]
    rows += [row(growing.WORKERS, "", rule="placed", N=number, **values) for number in (1, 2, 4)]
    rows += [row(growing.ADAPTERS, f"{n} adapters", rule="placed", **values) for n in (20, 2000)]
    rows += [row(decisions.DECISIONS, "1000 waiting", rule="placed", N=number, **values) for number in (2, 16)]
    draw(rows, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"hour.png", "batches.png", "placement.png", "growing.png", "decisions.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
