"""Moves in the arena between steps change no answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests.families import build_model
from tests.harness import FixedModes, RecordingEngine
from tests.references import NUM_TOKENS, CaseReference, assert_same
from vlora.config import EngineConfig
from vlora.engine import Engine, LocalEngine
from vlora.memory.arena import PAGE_BYTES, pages_for
from vlora.memory.host_to_device import Inline
from vlora.types import Mode, Request, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def reference(request: pytest.FixtureRequest, case_references: Callable[[str], CaseReference]) -> CaseReference:
    return case_references(request.param)


def shuffle(engine: Engine, draws: random.Random) -> int:
    """Move each movable block and adapter to a random free place, if there is one, and fill free pages with NaN.
    Returns the number of moves.
    """
    allocator, adapter_cache, pool = (
        engine.parts.block_manager.allocator,
        engine.parts.adapter_cache,
        engine.parts.device.pool,
    )
    moved = 0
    for block in sorted(allocator.taken_blocks | allocator.cached_blocks):
        free = [target for target in range(allocator.num_blocks) if not any(page_map(engine, target))]
        if free:
            allocator.move_block(block, draws.choice(free))
            moved += 1
    for name in sorted(adapter_cache.resident):
        run = adapter_cache.run(name)
        pages = allocator.page_map()
        pages[run.first_page : run.end] = bytes(run.num_pages)
        gaps = [
            first
            for first in range(adapter_cache.max_pages - run.num_pages + 1)
            if not any(pages[first : first + run.num_pages])
        ]
        target = draws.choice(gaps)
        if name not in adapter_cache.pinned and target != run.first_page:
            adapter_cache.move(name, target)
            moved += 1
    for name in adapter_cache.drain_moved():
        pool.relocate(name)
    for page, kind in enumerate(allocator.page_map()):
        if not kind:
            engine.parts.device.arena.buffer(page, 1).fill_(255)  # NaN in every dtype
    return moved


def page_map(engine: Engine, block: int) -> bytearray:
    run = engine.parts.block_manager.allocator.pages_of(block)
    return engine.parts.block_manager.allocator.page_map()[run.first_page : run.end]


def shuffled(recorded: RecordingEngine) -> list[int]:
    """Shuffle before every step from now on; returns the list of the number of moves per step."""
    counts: list[int] = []
    draws = random.Random(0)
    inner = recorded.engine.step

    def step():  # type: ignore[no-untyped-def]
        counts.append(shuffle(recorded.engine, draws))
        recorded.engine.check_integrity()
        return inner()

    recorded.engine.step = step  # type: ignore[method-assign]
    return counts


@pytest.mark.usefixtures("no_kv_admission")
@pytest.mark.parametrize("memory", ["ample", "scarce"])
def test_answers_stay_the_same_when_all_pages_move_between_steps(reference: CaseReference, memory: str) -> None:
    plan = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere64"), (Mode.MIXED, "patterned16")]
    policy = FixedModes(*plan[0], plan=plan)
    recorded = (
        RecordingEngine(reference, policy, scarce_memory=True)
        if memory == "scarce"
        else RecordingEngine(reference, policy, max_step_tokens=24)
    )
    recorded.answer(reference.cases, 1)  # from now on images are cached, so that all requests start at once
    counts = shuffled(recorded)
    answers = recorded.answer(reference.cases, NUM_TOKENS)
    for got, want in zip(answers, reference.answers, strict=True):
        assert_same(got, want)
    assert len(counts) >= NUM_TOKENS and sum(counts) > 4 * len(counts)
    assert (recorded.engine.stats().num_preemptions > 0) == (memory == "scarce")
    # Cached prompt blocks moved as well, and are still found.
    again = recorded.answer(reference.cases, 2)
    for (tokens, logits), want in zip(again, reference.answers, strict=True):
        assert_same((tokens, logits), (want[0][:2], want[1][:2]))
    assert memory == "scarce" or min(recorded.cached_tokens) > 0


def test_a_view_that_is_not_updated_changes_answers(reference: CaseReference) -> None:
    """The negative control: an adapter moved without updating its views changes the answer or fails."""
    recorded = RecordingEngine(reference, FixedModes(Mode.UNMERGED))
    recorded.engine.parts.device.pool.relocate = lambda key: None  # type: ignore[method-assign]
    shuffled(recorded)
    adapted = [case for case in reference.cases if case[0] == "wide8"]
    expected = [answer for case, answer in zip(reference.cases, reference.answers, strict=True) if case[0] == "wide8"]
    answers = recorded.answer(adapted, NUM_TOKENS)
    assert not any(torch.allclose(got[1], want[1], atol=1e-3) for got, want in zip(answers, expected, strict=True))


def test_an_adapter_gets_room_by_moving_another(reference: CaseReference) -> None:
    pages = {
        name: pages_for(status.num_bytes)
        for name, status in ((s.name, s) for s in RecordingEngine(reference, None).engine.adapters())
    }
    # narrow4 is between two gaps, which together have exactly the pages that the largest adapter needs. The least
    # recently used adapter is larger.
    gap = pages["everywhere64"] - pages["wide8"]
    share = pages["wide8"] + pages["narrow4"] + gap + pages["patterned16"]
    assert pages["patterned16"] > 2 * pages["narrow4"]
    config = EngineConfig(model=reference.family, block_size=8, arena_bytes=2 * share * PAGE_BYTES, max_context=256)
    local = LocalEngine(config, model=build_model(reference.family), executor=Inline())
    for name in pages:
        local.engine.load_adapter(name, reference.adapters[name])
    answers = {case[0]: (case[1], want) for case, want in zip(reference.cases, reference.answers, strict=True)}

    def ask(name: str) -> None:
        prompt, (expected, _) = answers[name]
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        request = Request(
            request_id=name, prompt_ids=prompt.prompt_ids, vision=prompt.vision, adapter=name, sampling=sampling
        )
        got = [token for output in local.run([request])[name] for token in output.token_ids]
        assert got == expected, name
        local.engine.check_integrity()

    ask("wide8")
    ask("narrow4")
    held = local.engine.parts.adapter_cache.reserve(gap)
    assert held is not None
    ask("patterned16")
    local.engine.parts.adapter_cache.release(held)
    ask("narrow4")
    local.engine.unload_adapter("wide8")
    ask("everywhere64")
    stats = local.engine.stats()
    assert stats.num_resident_adapters == 3 and stats.num_adapter_loads == 4, "no adapter was evicted"
    assert stats.relocated_bytes == pages["narrow4"] * PAGE_BYTES
    ask("narrow4")
    assert local.engine.stats().num_adapter_loads == 4, "it is still resident, at another place"
