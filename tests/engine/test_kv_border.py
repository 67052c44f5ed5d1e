"""The boundary between adapters and KV moves in both directions in a real engine."""

from __future__ import annotations

import pytest

from tests.families import build_model, make_prompt
from tests.oracle import Oracle
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.memory.arena import PAGE_BYTES, pages_for
from vlora.memory.host_to_device import Inline
from vlora.types import Request, SamplingParams

FAMILY = "llava"
ADAPTERS = ("wide8", "narrow4", "patterned16")
NUM_TOKENS = 12


def adapter_pages(folder: str) -> int:
    config = EngineConfig(model=FAMILY, block_size=8, arena_bytes=400 * PAGE_BYTES, max_context=64)
    engine = LocalEngine(config, model=build_model(FAMILY), executor=Inline()).engine
    return pages_for(engine.load_adapter("a", folder).num_bytes)


def test_unneeded_adapters_are_evicted_for_kv(tmp_path_factory: pytest.TempPathFactory) -> None:
    oracle = Oracle(FAMILY, build_model(FAMILY))
    folders = oracle.save(tmp_path_factory.mktemp("adapters"))
    prompt = make_prompt(FAMILY, build_model(FAMILY), 0, text=(30, 30))
    expected = oracle.generate(prompt, None, NUM_TOKENS)[0]
    pages = {name: adapter_pages(folder) for name, folder in folders.items() if name in ADAPTERS}
    # A block is one page here. Four requests need all pages that the pinned adapter leaves.
    blocks = 4 * -(-(len(prompt.prompt_ids) + NUM_TOKENS) // 8)
    config = EngineConfig(
        model=FAMILY,
        block_size=8,
        arena_bytes=(blocks + pages["patterned16"]) * PAGE_BYTES,
        max_context=128,
        prefix_cache=False,
        theta_s=100.0,
    )
    local = LocalEngine(config, model=build_model(FAMILY), executor=Inline())
    engine = local.engine
    for name in ADAPTERS:
        engine.load_adapter(name, folders[name])
        engine.pin_adapter(name, True)
    assert engine.stats().adapter_bytes == sum(pages[name] for name in ADAPTERS) * PAGE_BYTES
    for name in ("wide8", "narrow4"):
        engine.pin_adapter(name, False)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = local.run(
        Request(request_id=f"r{i}", prompt_ids=prompt.prompt_ids, vision=prompt.vision, sampling=sampling)
        for i in range(4)
    )
    for i in range(4):
        assert [token for output in outputs[f"r{i}"] for token in output.token_ids] == expected
    stats = engine.stats()
    assert stats.num_preemptions == 0
    assert {status.name for status in engine.adapters() if status.resident} == {"patterned16"}, "it is pinned"
    engine.check_integrity()
    device = engine.parts.device
    for linears in (device.hf_model.language_linears, device.hf_model.vision_linears):
        assert not any(linear.site.factors.keys() - device.pool.resident for linear in linears.values())
