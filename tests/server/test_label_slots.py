"""Label values of metrics: few names, those with the most requests, and every series only increases."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.orchestrator.sample_requests import make_request
from vlora.server.metrics import MAX_ADAPTERS, MAX_TENANTS, LabelSlots, Metrics
from vlora.types.composition import OTHER


def test_names_beyond_the_limit_count_as_other_until_they_are_busier() -> None:
    evicted: list[str] = []
    slots = LabelSlots(2, evicted.append)
    assert [slots.label(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]
    busy = [slots.label("c") for _ in range(10)]
    assert busy[0] == OTHER and busy[-1] == "c" and evicted == ["b"]
    assert slots.label("b") == OTHER == slots.current_label("b") and slots.current_label("a") == "a"


def test_two_equally_busy_names_do_not_alternate() -> None:
    evicted: list[str] = []
    slots = LabelSlots(1, evicted.append)
    for _ in range(10_000):
        slots.label("a")
        slots.label("b")
    assert len(evicted) <= 1


def test_a_name_without_recent_requests_loses_its_slot() -> None:
    slots = LabelSlots(1, lambda name: None)
    for _ in range(20_000):
        slots.label("old")
    labels = [slots.label("new") for _ in range(60_000)]
    assert labels[0] == OTHER and labels[-1] == "new"


@given(st.lists(st.sampled_from("abcdef"), max_size=300), st.integers(1, 3))
def test_labels_are_bounded_and_counters_only_increase(names: list[str], limit: int) -> None:
    series: Counter[str] = Counter()

    def forget(name: str) -> None:
        series.pop(name)

    slots = LabelSlots(limit, forget)
    for name in names:
        before = dict(series)
        series[slots.label(name)] += 1
        assert all(series[label] >= count for label, count in before.items() if label in series)
        assert len(series.keys() - {OTHER}) <= limit


@pytest.mark.slow
def test_a_thousand_adapters_and_tenants_make_few_series() -> None:
    metrics = Metrics("base", "0")
    few = len(metrics.render(None).splitlines())
    metrics.expect(f"early{number}" for number in range(1000))
    for number in range(1000):
        for _ in range(1 + number // 100):
            request = make_request("r", f"adapter{number}", tenant=f"tenant{number}")
            metrics.answered(request, total_s=1.0, first_s=0.5, queue_s=0.1, num_completion=4)
            metrics.count("ok", f"adapter{number}", f"tenant{number}")
    text = metrics.render(None).decode()
    for label, most in (("adapter", MAX_ADAPTERS + 4), ("tenant", MAX_TENANTS + 1)):
        parts = (line.partition(f'{label}="')[2] for line in text.splitlines())
        assert len({part.partition('"')[0] for part in parts if part}) <= most
    assert len(text.splitlines()) < few + 150 * MAX_ADAPTERS
