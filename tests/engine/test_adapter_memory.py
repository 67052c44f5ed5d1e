"""The arena's room for adapters: pins, moves that make room, and the border between adapters and KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.engine.asking import ask, tokens
from tests.engine.forms import FormReference
from tests.families import Prompt, make_prompt
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadRequest, OverCapacity, UnknownAdapter
from vlora.memory.arena import PAGE_BYTES, pages_for
from vlora.memory.host_to_device import Inline

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def reference(form_reference: Callable[[str, str], FormReference]) -> FormReference:
    return form_reference("lora", "llava")


@pytest.fixture(scope="module")
def pages(reference: FormReference) -> Mapping[str, int]:
    """The pages of each adapter, the smallest first."""
    local = engine(reference, 400, *reference.adapters)
    found = {status.name: pages_for(status.num_bytes) for status in local.engine.adapters()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def engine(reference: FormReference, num_pages: int, *adapters: str, **settings: Any) -> LocalEngine:
    """An engine with these adapters loaded; half of its pages are for adapters."""
    fields = {"block_size": 8, "arena_bytes": num_pages * PAGE_BYTES, "max_context": 128, **settings}
    local = LocalEngine(EngineConfig(model="llava", **fields), model=reference.new_model(), executor=Inline())
    for name in adapters:
        local.engine.load_adapter(name, reference.adapters[name])
    return local


def check(reference: FormReference, local: LocalEngine, adapter: str | None, prompt: Prompt, count: int = 1) -> None:
    """The same request `count` times at once, compared with PEFT's answer."""
    made = [ask(prompt, str(number), adapter, NUM_TOKENS) for number in range(count)]
    for outputs in local.run(made).values():
        assert tokens(outputs) == reference.answer(adapter, prompt, NUM_TOKENS)[0]
    local.engine.check_integrity()


def residents(local: LocalEngine) -> set[str]:
    return {status.name for status in local.engine.adapters() if status.resident}


def test_a_pinned_adapter_stays_while_others_are_loaded_and_evicted(
    reference: FormReference, pages: Mapping[str, int]
) -> None:
    pinned, *others, largest = pages
    # Room for the pinned adapter and the largest one, and no third one.
    local = engine(reference, 2 * (pages[pinned] + pages[largest]), *pages)
    status = local.engine.pin_adapter(pinned, True)
    assert status.pinned and status.resident and residents(local) == {pinned}
    assert local.engine.pin_adapter(pinned, True) == status
    hits = 0
    for name in (largest, *others, largest, largest, pinned):
        hits += name in residents(local)
        check(reference, local, name, make_prompt("llava", reference.model, 0))
        assert {pinned, name} <= residents(local)
    stats = local.engine.stats()
    assert (stats.num_adapter_hits, stats.num_adapter_misses) == (hits, 6 - hits) and 2 <= hits < 6
    assert stats.num_resident_adapters == len(residents(local))
    with pytest.raises(OverCapacity, match=f"would leave .* pages of the arena, .* adapter '{largest}' needs"):
        local.engine.pin_adapter(others[0], True)
    with pytest.raises(BadRequest, match=f"'{pinned}' is pinned; unpin it"):
        local.engine.load_adapter(pinned, reference.adapters[largest])
    assert not local.engine.pin_adapter(pinned, False).pinned
    assert local.engine.pin_adapter(pinned, True).pinned
    local.engine.unload_adapter(pinned)
    assert pinned not in residents(local)
    local.engine.check_integrity()
    with pytest.raises(UnknownAdapter, match=f"no adapter named '{pinned}'"):
        local.engine.pin_adapter(pinned, True)


def test_new_content_that_does_not_fit_leaves_the_old_one_serving(
    reference: FormReference, pages: Mapping[str, int]
) -> None:
    large, small = pages["everywhere64"], pages["narrow4"]
    local = engine(reference, 2 * (large + small - 1), "narrow4", "everywhere64")
    local.engine.unload_adapter("everywhere64")
    narrow, everywhere = reference.adapters["narrow4"], reference.adapters["everywhere64"]
    local.engine.load_adapter("pinned", narrow)
    local.engine.pin_adapter("pinned", True)
    for name in ("narrow4", "new"):
        with pytest.raises(
            OverCapacity,
            match=f"'{name}' needs {large} contiguous .* only {large - 1} are available .1 adapters are pinned",
        ):
            local.engine.load_adapter(name, everywhere)
    check(reference, local, "narrow4", make_prompt("llava", reference.model, 0))
    assert local.engine.stats().num_adapters == 2


def test_an_adapter_gets_room_by_moving_another(reference: FormReference, pages: Mapping[str, int]) -> None:
    # narrow4 is between two gaps, which together have exactly the pages that the largest adapter needs. The least
    # recently used adapter is larger.
    gap = pages["everywhere64"] - pages["wide8"]
    share = pages["wide8"] + pages["narrow4"] + gap + pages["patterned16"]
    assert pages["patterned16"] > 2 * pages["narrow4"]
    local = engine(reference, 2 * share, *pages)
    prompts = dict(reference.cases)
    for name in ("wide8", "narrow4"):
        check(reference, local, name, prompts[name])
    held = local.engine.parts.adapter_cache.reserve(gap)
    assert held is not None
    check(reference, local, "patterned16", prompts["patterned16"])
    local.engine.parts.adapter_cache.release(held)
    check(reference, local, "narrow4", prompts["narrow4"])
    local.engine.unload_adapter("wide8")
    check(reference, local, "everywhere64", prompts["everywhere64"])
    stats = local.engine.stats()
    assert stats.num_resident_adapters == 3 and stats.num_adapter_loads == 4, "no adapter was evicted"
    assert stats.relocated_bytes == pages["narrow4"] * PAGE_BYTES
    check(reference, local, "narrow4", prompts["narrow4"])
    assert local.engine.stats().num_adapter_loads == 4, "it is still resident, at another place"


def test_unneeded_adapters_are_evicted_for_kv(reference: FormReference, pages: Mapping[str, int]) -> None:
    prompt = make_prompt("llava", reference.model, 0, text=(30, 30))
    # A block is one page here. Four requests need all pages that the pinned adapter leaves.
    blocks = 4 * -(-(len(prompt.prompt_ids) + NUM_TOKENS) // 8)
    names = ("wide8", "narrow4", "patterned16")
    local = engine(reference, blocks + pages["patterned16"], *names, prefix_cache=False, theta_s=100.0)
    for name in names:
        local.engine.pin_adapter(name, True)
    assert local.engine.stats().adapter_bytes == sum(pages[name] for name in names) * PAGE_BYTES
    for name in ("wide8", "narrow4"):
        local.engine.pin_adapter(name, False)
    check(reference, local, None, prompt, count=4)
    assert local.engine.stats().num_preemptions == 0 and residents(local) == {"patterned16"}, "it is pinned"
    device = local.engine.parts.device
    for linears in (device.hf_model.language_linears, device.hf_model.vision_linears):
        assert not any(linear.site.factors.keys() - device.pool.resident for linear in linears.values())
