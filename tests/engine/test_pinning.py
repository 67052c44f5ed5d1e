"""Pinned adapters."""

from __future__ import annotations

import pytest

from tests.families import build_model, make_prompt
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadRequest, OverCapacity, UnknownAdapter
from vlora.memory.arena import PAGE_BYTES
from vlora.types import Request, SamplingParams

FAMILY = "llava"


def engine(num_pages: int) -> LocalEngine:
    config = EngineConfig(model=FAMILY, block_size=8, arena_bytes=num_pages * PAGE_BYTES, max_context=64)
    return LocalEngine(config, model=build_model(FAMILY))


def answer(local: LocalEngine, adapter: str) -> None:
    prompt = make_prompt(FAMILY, build_model(FAMILY), 0)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    request = Request(request_id="r", prompt_ids=prompt.prompt_ids, adapter=adapter, sampling=sampling)
    assert local.run([request])["r"][-1].finish_reason == "length"
    local.engine.check_integrity()


def residents(local: LocalEngine) -> set[str]:
    return {status.name for status in local.engine.adapters() if status.resident}


def test_a_pinned_adapter_stays_while_others_are_loaded_and_evicted(adapter_folders: dict[str, str]) -> None:
    pages = {}
    for name, path in adapter_folders.items():
        pages[name] = -(-engine(400).engine.load_adapter(name, path).num_bytes // PAGE_BYTES)
    largest = max(pages, key=lambda name: pages[name])
    pinned, *others = sorted(set(pages) - {largest}, key=lambda name: pages[name])
    # Room for the pinned adapter and the largest one, and no third one.
    local = engine(2 * (pages[pinned] + pages[largest]))
    for name, path in adapter_folders.items():
        local.engine.load_adapter(name, path)
    status = local.engine.pin_adapter(pinned, True)
    assert status.pinned and status.resident and residents(local) == {pinned}
    assert local.engine.pin_adapter(pinned, True) == status
    hits = 0
    for name in (largest, *others, largest, largest, pinned):
        hits += name in residents(local)
        answer(local, name)
        assert {pinned, name} <= residents(local)
    stats = local.engine.stats()
    assert (stats.num_adapter_hits, stats.num_adapter_misses) == (hits, 6 - hits) and 2 <= hits < 6
    assert local.engine.stats().num_resident_adapters == len(residents(local))
    # A second pin would leave no room for the largest adapter.
    with pytest.raises(OverCapacity, match=f"would leave .* pages of the arena, .* adapter '{largest}' needs"):
        local.engine.pin_adapter(others[0], True)
    with pytest.raises(BadRequest, match=f"'{pinned}' is pinned; unpin it"):
        local.engine.load_adapter(pinned, adapter_folders[largest])
    local.engine.check_integrity()
    assert not local.engine.pin_adapter(pinned, False).pinned
    assert local.engine.pin_adapter(pinned, True).pinned


def test_unloading_a_pinned_adapter_frees_it(adapter_folders: dict[str, str]) -> None:
    local = engine(400)
    local.engine.load_adapter("a", adapter_folders["narrow4"])
    local.engine.pin_adapter("a", True)
    local.engine.unload_adapter("a")
    assert local.engine.stats().adapter_bytes == 0 and local.engine.adapters() == ()
    local.engine.check_integrity()
    with pytest.raises(UnknownAdapter, match="no adapter named 'a'"):
        local.engine.pin_adapter("a", True)


def test_an_adapter_too_large_next_to_pinned_ones_is_refused(adapter_folders: dict[str, str]) -> None:
    roomy = engine(400)
    large, small = (
        -(-roomy.engine.load_adapter(name, adapter_folders[name]).num_bytes // PAGE_BYTES)
        for name in ("everywhere64", "narrow4")
    )
    tight = engine(2 * (large + small - 1))
    tight.engine.load_adapter("everywhere64", adapter_folders["everywhere64"])
    tight.engine.unload_adapter("everywhere64")
    tight.engine.load_adapter("narrow4", adapter_folders["narrow4"])
    tight.engine.pin_adapter("narrow4", True)
    with pytest.raises(
        OverCapacity, match=f"needs {large} contiguous .* only {large - 1} are available .1 adapters are pinned"
    ):
        tight.engine.load_adapter("everywhere64", adapter_folders["everywhere64"])


@pytest.mark.slow
def test_new_content_that_does_not_fit_leaves_the_old_one_serving(adapter_folders: dict[str, str]) -> None:
    roomy = engine(400)
    large, small = (
        -(-roomy.engine.load_adapter(name, adapter_folders[name]).num_bytes // PAGE_BYTES)
        for name in ("everywhere64", "narrow4")
    )
    tight = engine(2 * (large + small - 1))
    before = tight.engine.load_adapter("a", adapter_folders["narrow4"])
    tight.engine.load_adapter("pinned", adapter_folders["narrow4"])
    tight.engine.pin_adapter("pinned", True)
    with pytest.raises(OverCapacity, match="adapter 'a' needs"):
        tight.engine.load_adapter("a", adapter_folders["everywhere64"])
    assert before.version in {status.version for status in tight.engine.adapters() if status.name == "a"}
    answer(tight, "a")
    assert tight.engine.stats().num_adapters == 2
