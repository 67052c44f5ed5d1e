"""Prefix-cache use by the scheduler: computing, waiting for another request's blocks, preemption, and counters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.orchestrator.checked_replica import CheckedReplica, Script, box, shares, tight
from tests.orchestrator.sample_requests import IMAGE_TOKEN, make_request, sampled_token
from vlora.orchestrator import request_state
from vlora.types import Batch


def sharing(policy: Any = None, **settings: Any) -> CheckedReplica:
    return box(policy, prefix_cache=True, **settings)


def preempted(batch: Batch | None) -> set[str]:
    assert batch is not None
    return set(batch.preempted)


def test_the_next_turn_computes_only_new_tokens() -> None:
    simulation = sharing(policy := Script())
    simulation.add(make_request("first", prompt=10, max_tokens=7))
    simulation.run()
    turn = (*range(1, 11), *simulation.tokens("first"), 30, 31)
    simulation.add(make_request("second", prompt=turn, max_tokens=1))
    # The first turn's KV covers 16 of its tokens: the last token of an answer is never computed.
    assert shares(simulation.step()) == {"second": (16, 19)}
    assert [(c.new_tokens, c.cached_len) for c in policy.seen[-1][0]] == [(3, 16)], "policies see the tokens left"
    timings, stats = simulation.last("second").timings, simulation.stats
    assert timings is not None and (timings.num_prompt_tokens, timings.num_cached_tokens) == (19, 16)
    assert (stats.num_computed_tokens, stats.num_reused_tokens) == (10 + 3, 16)
    assert stats.free_blocks == stats.total_blocks and stats.cached_blocks == 4


def test_the_same_text_with_another_image_is_computed() -> None:
    simulation = sharing()
    prompt = (1, *[IMAGE_TOKEN] * 9, 2, 3)
    for name, picture, found in (("a", "cat", 0), ("b", "dog", 0), ("c", "cat", 8)):
        simulation.add(make_request(name, prompt=prompt, images=[(picture, 9)], max_tokens=1))
        while not (step := shares(simulation.step())):
            pass  # the image is being encoded
        assert step == {name: (found, 12)}


@pytest.mark.parametrize(
    ("number", "common", "most", "starve_after", "steps"),
    [
        # Requests with a common prefix wait for the first to compute it.
        (4, 16, 32, None, [{"q0": (0, 18)}, {f"q{i}": (16, 18) for i in (1, 2, 3)}]),
        # A prefix that is longer than a step is computed once.
        (2, 24, 10, None, [{"q0": (0, 10)}, {"q0": (10, 20)}, {"q0": (20, 26)}, {"q1": (24, 26)}]),
        # A starving request gets one token after the known blocks.
        (2, 24, 10, 1, [{"q0": (0, 10)}, {"q0": (10, 19), "q1": (8, 9)}, {"q0": (19, 26)}, {"q1": (24, 26)}]),
    ],
)
def test_a_common_prefix_is_computed_once(
    number: int, common: int, most: int, starve_after: int | None, steps: list[object]
) -> None:
    simulation = sharing(Script(), max_step_tokens=most)
    simulation.add(
        *(make_request(f"q{i}", prompt=(*range(1, common + 1), 30 + i, 40), max_tokens=1) for i in range(number))
    )
    for place, expected in enumerate(steps):
        if place == starve_after:
            simulation.clock.now += 20
        assert shares(simulation.step()) == expected
    assert simulation.stats.num_computed_tokens == common + 2 * number + (starve_after is not None)


def test_prefix_lookups_are_spread_over_steps_and_exact_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_state, "MAX_LOOKUPS", 3)
    simulation = sharing(Script("a", *["b"] * 3), max_step_tokens=64)
    simulation.add(make_request("a", prompt=30, max_tokens=1))
    simulation.step()
    simulation.add(make_request("c", prompt=30, max_tokens=1), make_request("b", prompt=30, max_tokens=1))
    assert shares(simulation.step()) == {"b": (28, 30)}, "b has no forecast yet"


def test_blocks_of_a_failed_step_are_not_reused() -> None:
    simulation = sharing(failing={"bad": 2}, max_step_tokens=8)
    simulation.add(make_request("bad", prompt=20, max_tokens=1))
    simulation.run()
    assert simulation.end("bad") == "bad_image"
    simulation.add(make_request("good", prompt=20, max_tokens=1))
    assert shares(simulation.step()) == {"good": (8, 16)}, "the tokens of the first step are valid"


def test_evicted_blocks_are_computed_again() -> None:
    simulation = tight(Script("a", "b", "c"), 5, prefix_cache=True)
    simulation.add(make_request("a", prompt=17, max_tokens=1))
    simulation.step()
    simulation.add(make_request("b", prompt=(99, *range(10)), max_tokens=1))
    simulation.step()  # takes one free block and two of a's
    simulation.add(make_request("c", prompt=17, max_tokens=1))
    assert shares(simulation.step()) == {"c": (8, 17)}


# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_kv_admission")
def test_requests_that_share_all_blocks_are_preempted_together() -> None:
    # x and y share three blocks and have one each; z needs four of six.
    simulation = tight(Script("x", "xy", "z"), 6, prefix_cache=True)
    simulation.add(make_request("z", prompt=tuple(range(50, 66)), max_tokens=1))
    simulation.add(make_request("x", prompt=13, max_tokens=4), make_request("y", prompt=13, max_tokens=4))
    simulation.step()
    simulation.step()
    assert simulation.allocator.num_free_blocks == 1
    assert preempted(simulation.step()) == {"x", "y"}
    simulation.run()
    assert {simulation.end(name) for name in "xyz"} == {"length"}


@pytest.mark.usefixtures("no_kv_admission")
def test_a_request_that_shares_all_blocks_is_not_preempted_alone() -> None:
    simulation = tight(Script("xw", "y", "z"), 6, max_step_tokens=10, prefix_cache=True)
    prompts: dict[str, int | tuple[int, ...]] = {"z": tuple(range(90, 99)), "x": 13, "y": (80, 81, 82, 83, 84), "w": 13}
    simulation.add(*(make_request(name, prompt=prompt) for name, prompt in prompts.items()))
    simulation.scheduler.admit(frozenset())
    simulation.clock.now += 20
    assert shares(simulation.step()) == {"x": (0, 9), "w": (0, 1)}
    simulation.step()
    tables = simulation.block_manager.table
    assert tables("w") == tables("x")[:2], "w reuses the blocks that x computed"
    assert simulation.allocator.num_free_blocks == 1
    assert preempted(simulation.step()) == {"y"}, "w is newer, but preempting it would free no block"
    simulation.run()


@pytest.mark.usefixtures("no_kv_admission")
def test_a_preempted_request_resumes_from_its_cached_blocks() -> None:
    simulation = tight(Script("x", "x", "x", "y", "x"), 3, prefix_cache=True)
    simulation.add(make_request("y", prompt=(40, 41, 42, 43, 44), max_tokens=1))
    simulation.add(make_request("x", prompt=6, max_tokens=5))
    for _ in range(3):
        simulation.step()
    assert preempted(simulation.step()) == {"x"}
    # Two blocks hold its first eight tokens; y took the free block and the later of the two.
    assert shares(simulation.step()) == {"x": (4, 9)}
    simulation.run()
    assert simulation.tokens("x") == [sampled_token("x", place) for place in range(5)]
