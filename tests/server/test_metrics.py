"""Metrics: what they count, their few labels, and series that only increase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.orchestrator.sample_requests import make_request
from tests.server.api import Api, data_url, running_api
from tests.server.running import png
from tests.server.scripted import ScriptedEngine
from vlora.cluster.summary import merged_stats
from vlora.config import EngineConfig
from vlora.server.metrics import MAX_ADAPTERS, MAX_TENANTS, MAX_TRAININGS, LabelSlots, Metrics
from vlora.types import EngineStats, TrainingStatus
from vlora.types.composition import OTHER


def series(text: str) -> dict[str, float]:
    """The metrics in a scraper's view, by name and label values."""
    return {
        " ".join((sample.name.removeprefix("vlora_"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(api: Api) -> dict[str, float]:
    return series(api.call("GET", "/metrics")[1])


def within(found: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    assert {name: found.get(name) for name in expected} == expected
    return True


def test_requests_tokens_and_times_are_counted_by_adapter_and_outcome() -> None:
    with running_api(adapters={"cam": {"night": 1}, "signs": {"night": 1}}) as api:
        # A series exists before its first event; otherwise the first event is no increase.
        assert within(
            scraped(api),
            {
                **dict.fromkeys(("engine_up", "server_info base 0.1.0"), 1),
                **dict.fromkeys(("requests_active", "requests_total base engine_dead", "frames_total dropped"), 0),
                **dict.fromkeys(("engine_steps_total mixed", "requests_total signs step_failed"), 0),
                "adapter_loads_total signs": 0,
            },
        )
        assert api.chat("say:four", n=2)[0] == 200 and api.chat("")[0] == 400
        api.chat("forever", stream=True, max_tokens=5)
        assert api.chat("say:four", model="cam")[0] == 200 and api.chat("fail", model="signs")[0] == 500
        assert api.chat("say:x", model="absent")[0] == 404
        assert api.call("POST", "/v1/heads/cam/night", {"images": [data_url(png())]})[0] == 200
        with api.client() as client:
            assert "".join(client.stream("say:x", adapter="signs")) == "x"
        after = scraped(api)
        counts = {"time_to_first_token", "time_per_output_token", "request_queue"}
        assert within(
            after,
            {
                "requests_total base ok": 2,
                "requests_total base bad_request": 1,
                **{f"{name}_seconds_count base": 3 for name in counts},
                "tokens_total base completion": 2 * 5 + 5,
                **dict.fromkeys(("requests_active", "queue_requests running", "requests_total signs cancelled"), 0),
                "requests_total cam ok": 2,
                "tokens_total cam completion": 5,
                "request_seconds_count cam": 2,
                "requests_total signs step_failed": 1,
                "requests_total signs ok": 1,
                "request_seconds_count signs": 1,
                "requests_total unknown unknown_adapter": 1,
            },
        )
        assert not any("absent" in name for name in after) and after["engine_steps_total unmerged"] > 0
        for name in (
            *("switches_total", "arena_bytes kv", "arena_bytes adapters", "vision_cache_total hit", "streams_open"),
            *("encoded_patches_total", "encode_seconds_total", "adapter_requests_total hit", "frames_taken_total"),
            *("engine_prompt_tokens_total reused", "highest_credit_seconds", "engine_restarts_total"),
        ):
            assert name in after
        api.engine.dead = "killed"
        assert within(scraped(api), {"engine_up": 0, "requests_total base ok": 2})


def test_compositions_have_one_series() -> None:
    with running_api(adapters={"a": {}, "b": {}}) as api:
        for number in range(1, 2 * MAX_ADAPTERS):
            assert api.chat("say:x", model={"a": 1 + number / 1000, "b": 1})[0] == 200
        assert api.chat("say:x", model="1.0*a")[0] == 200 and api.chat("fail", model="a+b")[0] == 500
        found = scraped(api)
        labels = {name.split()[1] for name in found if name.startswith("requests_total ")}
        assert labels == {"base", "unknown", "composed", "other", "a", "b"}
        ok = {"requests_total composed ok": 2 * MAX_ADAPTERS - 1, "requests_total a ok": 1}
        assert within(found, ok | {"requests_total composed step_failed": 1})


# -- label values -----------------------------------------------------------------------------------------------------


def test_names_beyond_the_limit_count_as_other_until_they_are_busier() -> None:
    evicted: list[str] = []
    slots = LabelSlots(2, evicted.append)
    assert [slots.label(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]
    busy = [slots.label("c") for _ in range(10)]
    assert busy[0] == OTHER and busy[-1] == "c" and evicted == ["b"]
    assert slots.label("b") == OTHER == slots.current_label("b") and slots.current_label("a") == "a"
    alternating = LabelSlots(1, evicted.append)
    for _ in range(10_000):
        alternating.label("a")
        alternating.label("b")
    assert len(evicted) <= 2, "two equally busy names do not alternate"
    slots = LabelSlots(1, evicted.append)
    for _ in range(20_000):
        slots.label("old")
    labels = [slots.label("new") for _ in range(60_000)]
    assert labels[0] == OTHER and labels[-1] == "new", "a name without recent requests loses its slot"


@given(st.lists(st.sampled_from("abcdef"), max_size=300), st.integers(1, 3))
def test_labels_are_bounded_and_counters_only_increase(names: list[str], limit: int) -> None:
    found: Counter[str] = Counter()

    def forget(name: str) -> None:
        found.pop(name)

    slots = LabelSlots(limit, forget)
    for name in names:
        before = dict(found)
        found[slots.label(name)] += 1
        assert all(found[label] >= count for label, count in before.items() if label in found)
        assert len(found.keys() - {OTHER}) <= limit


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


# -- trainings and the served base ------------------------------------------------------------------------------------


def stats_with(*trainings: TrainingStatus, **fields: Any) -> EngineStats:
    stats = ScriptedEngine(EngineConfig(model="scripted")).stats()
    return msgspec.structs.replace(stats, trainings=trainings, **fields)


RUNNING = TrainingStatus(name="signs", state="running", step=3, num_steps=9, num_tokens=70, loss=0.25, seconds=1.5)
NEW = TrainingStatus(name="cars", state="running", step=0, num_steps=9)


def test_trainings_and_clients_of_the_base_model_have_series() -> None:
    base = {"num_base_clients": 2, "num_base_calls": 30, "num_base_rows": 900, "base_s": 1.5}
    found = series(Metrics().render(stats_with(RUNNING, NEW, **base)).decode())
    training = {"training_steps_total": 3, "training_tokens_total": 70, "training_seconds_total": 1.5}
    assert within(
        found,
        {f"{name} signs": value for name, value in (training | {"training_loss": 0.25}).items()}
        | {"training_steps_total cars": 0, "trainings running": 2, "trainings failed": 0}
        | {"base_clients": 2, "base_calls_total": 30, "base_rows_total": 900, "base_seconds_total": 1.5},
    )
    assert "training_loss cars" not in found, "it has no loss yet"
    many = [TrainingStatus(name=f"t{n}", state="failed", step=0, num_steps=1) for n in range(MAX_TRAININGS + 9)]
    found = series(Metrics().render(stats_with(*many)).decode())
    assert found["trainings failed"] == MAX_TRAININGS + 9
    assert sum(name.startswith("training_steps_total ") for name in found) == MAX_TRAININGS
    assert merged_stats([stats_with(RUNNING), stats_with(), stats_with(NEW)]).trainings == (RUNNING, NEW)
