"""Snapshots of a real engine agree with its counters and its page bookkeeping."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.asking import ask, finish
from tests.families import build_model, make_prompt
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.monitor import Rates, arena_cells
from vlora.engine.snapshot import EngineSnapshot
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.page_allocator import PageRun
from vlora.types import Request

FAMILY = "llava"
PROMPT = make_prompt(FAMILY, build_model(FAMILY), 0, num_images=1)


@pytest.fixture
def local(llava_engine: Callable[..., LocalEngine]) -> LocalEngine:
    return llava_engine(max_batch_size=4)


def requests(count: int) -> list[Request]:
    adapters = ("wide8", "wide8", "everywhere64", None)
    return [ask(PROMPT, f"r{number}", adapters[number % 4], 4) for number in range(count)]


def check(snapshot: EngineSnapshot) -> None:
    """Invariants of every snapshot with all of the engine's steps."""
    stats, arena = snapshot.stats, snapshot.arena
    assert [step.number for step in snapshot.steps] == list(range(1, stats.num_steps + 1))
    # Steps without tokens encode images and have no mode.
    assert Counter(step.mode for step in snapshot.steps if step.num_tokens) == Counter(stats.steps_by_mode)
    assert sum(step.switch_s for step in snapshot.steps) == pytest.approx(stats.switch_s)
    assert len(snapshot.queue) == stats.num_waiting + stats.num_running
    assert sum(request.running for request in snapshot.queue) == stats.num_running
    credits = [request.credit_s for request in snapshot.queue]
    assert credits == sorted(credits, reverse=True)
    assert arena.pages_per_cell == 1 and len(arena.cells) == arena.num_pages
    held = {kind: count * PAGE_BYTES for kind, count in Counter(arena.cells).items()}
    assert held.get("a", 0) + held.get("p", 0) == stats.adapter_bytes
    assert held.get("k", 0) == stats.kv_bytes and held.get("c", 0) == stats.cached_kv_bytes
    for _, first, pages in map(msgspec.structs.astuple, arena.runs):
        assert set(arena.cells[first : first + pages]) <= {"a", "p"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=EngineSnapshot) == snapshot


def test_a_snapshot_agrees_with_counters_and_page_map_between_steps(local: LocalEngine) -> None:
    engine = local.engine
    for request in requests(8):
        engine.add(request)
    assert {request.adapter for request in engine.snapshot().queue} == {"wide8", "everywhere64", None}
    while engine.has_work:
        check(engine.snapshot())
        engine.step()
    last = engine.snapshot()
    check(last)
    assert not last.queue and {step.merged for step in last.steps} >= {None}
    assert sum(step.num_tokens for step in last.steps) > 0
    half = last.stats.num_steps // 2
    assert engine.snapshot(half).steps == last.steps[half:]
    assert engine.snapshot(10**9).steps == ()


def test_only_adapters_in_demand_or_on_the_device_are_listed(
    local: LocalEngine, adapter_folders: dict[str, str]
) -> None:
    engine = local.engine
    engine.register_adapters({"later": adapter_folders["wide8"], "never": adapter_folders["wide8"]})
    assert engine.snapshot().adapters == ()
    added = [*requests(6), msgspec.structs.replace(requests(1)[0], request_id="x", adapter="later")]
    for request in added:
        engine.add(request)
    before = {load.name: load for load in engine.snapshot().adapters}
    assert {name: load.num_under_way for name, load in before.items()} == {"wide8": 4, "everywhere64": 1, "later": 1}
    assert (before["later"].place, before["wide8"].place) == ("disk", "host")
    finish(engine)
    engine.pin_adapter("later", True)
    after = {load.name: load for load in engine.snapshot().adapters}
    assert {load.place for load in after.values()} == {"device"} and after["later"].pinned
    assert next(iter(after)) == "wide8" and after["wide8"].rate > after["later"].rate > 0
    assert [load.num_under_way for load in after.values()] == [0, 0, 0]
    engine.unload_adapter("wide8")
    assert set(load.name for load in engine.snapshot().adapters) == {"everywhere64", "later"}


def test_only_the_last_steps_are_kept(adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.engine.monitor.MAX_STEPS", 10)
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=32 * 2**20), model=build_model(FAMILY))
    local.run([ask(PROMPT, num_tokens=13, prompt_ids=(3, 4, 5), vision=())])
    assert [step.number for step in local.engine.snapshot().steps] == list(range(4, 14))
    assert [step.number for step in local.engine.snapshot(11).steps] == [12, 13]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300), st.integers(1, 50), st.data())
def test_a_cell_shows_the_kind_of_most_of_its_pages(kinds: list[int], most: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(kinds) - 1))
    packed = PageRun(first, data.draw(st.integers(1, len(kinds) - first)))
    size, cells = arena_cells(bytes(kinds), [packed], most)
    assert len(cells) <= most and (len(cells) - 1) * size < len(kinds) <= len(cells) * size
    letters = ["p" if packed.first_page <= page < packed.end else "fakc"[kind] for page, kind in enumerate(kinds)]
    for place, cell in enumerate(cells):
        counts = Counter(letters[place * size : (place + 1) * size])
        assert counts[cell] == max(counts.values())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30)), max_size=40))
def test_a_rate_is_the_sum_of_decayed_requests(arrivals: list[tuple[str, float]]) -> None:
    now = 0.0
    rates = Rates(lambda: now)
    times: dict[str, list[float]] = {}
    for name, pause in arrivals:
        now += pause
        rates.count(name)
        times.setdefault(name, []).append(now)
    now += 1.0
    expected = {name: sum(math.exp((then - now) / 10) / 10 for then in added_s) for name, added_s in times.items()}
    found = rates.read()
    for name, rate in expected.items():
        assert found.get(name, 0.0) == pytest.approx(rate, abs=1.1e-3)
    assert rates.read() == found
