"""Prefix-cache use by the scheduler: computing, waiting for another request's blocks, preemption, and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.orchestrator.checked_replica import CheckedReplica
from tests.orchestrator.sample_requests import IMAGE_TOKEN, make_request, sampled_token
from tests.orchestrator.test_scheduler import Script, box, last, shares
from vlora.orchestrator import Candidate, Decision, PolicyState, request_state
from vlora.types import Batch


def sharing(policy: object = None, **settings: Any) -> CheckedReplica:
    """Blocks of four tokens, one second per step."""
    return box(policy, prefix_cache=True, **settings)


def preempted(batch: Batch | None) -> tuple[str, ...]:
    assert batch is not None
    return batch.preempted


def test_the_next_turn_computes_only_new_tokens() -> None:
    simulation = sharing()
    simulation.add(make_request("first", prompt=10, max_tokens=7))
    simulation.run()
    answer = tuple(sampled_token("first", place) for place in range(7))
    turn = (*range(1, 11), *answer, 30, 31)
    simulation.add(make_request("second", prompt=turn, max_tokens=1))
    # The first turn's KV covers 16 of its tokens: the last token of an answer is never computed.
    assert shares(simulation.step()) == {"second": (16, 19)}
    timings = last(simulation, "second").timings
    assert timings is not None and (timings.num_prompt_tokens, timings.num_cached_tokens) == (19, 16)
    stats = simulation.scheduler.stats("simulated")
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


def test_requests_with_a_common_prefix_wait_for_the_first_to_compute_it() -> None:
    simulation = sharing(max_step_tokens=32)
    simulation.add(*(make_request(f"q{i}", prompt=(*range(1, 17), 20 + i, 30), max_tokens=1) for i in range(4)))
    assert shares(simulation.step()) == {"q0": (0, 18)}
    assert shares(simulation.step()) == {f"q{i}": (16, 18) for i in (1, 2, 3)}
    assert simulation.scheduler.stats("simulated").num_computed_tokens == 18 + 3 * 2


def test_a_common_prefix_longer_than_a_step_is_computed_once() -> None:
    simulation = sharing(max_step_tokens=10)
    simulation.add(*(make_request(f"q{i}", prompt=(*range(1, 25), 30 + i), max_tokens=1) for i in range(2)))
    assert [shares(simulation.step()) for _ in range(3)] == [
        {"q0": (0, 10)},
        {
            "q0": (10, 20),
        },
        {"q0": (20, 25)},
    ]
    assert shares(simulation.step()) == {"q1": (24, 25)}


def test_a_starving_request_runs_and_reuses_blocks_of_others() -> None:
    simulation = sharing(Script(), max_step_tokens=10)
    simulation.add(*(make_request(f"q{i}", prompt=(*range(1, 25), 30 + i), max_tokens=1) for i in range(2)))
    simulation.step()
    simulation.clock.now += 20
    assert shares(simulation.step()) == {"q0": (10, 19), "q1": (8, 9)}, "one token after the known blocks"
    assert shares(simulation.step()) == {"q0": (19, 25)}
    assert shares(simulation.step()) == {"q1": (24, 25)}
    assert simulation.scheduler.stats("simulated").num_computed_tokens == 25 + 2


def test_policies_see_the_tokens_left_to_compute() -> None:
    seen: list[tuple[int, int]] = []

    class Spy(Script):
        def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
            seen.extend((c.new_tokens, c.cached_len) for c in ready)
            return super().decide(ready, state)

    simulation = sharing(Spy())
    for name in "ab":
        simulation.add(make_request(name, prompt=18, max_tokens=1))
        simulation.run()
    assert seen == [(18, 0), (2, 16)]


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
    assert last(simulation, "bad").finish_reason == "error"
    simulation.add(make_request("good", prompt=20, max_tokens=1))
    assert shares(simulation.step()) == {"good": (8, 16)}, "the tokens of the first step are valid"


def test_evicted_blocks_are_computed_again() -> None:
    simulation = sharing(Script("a", "b", "c"), num_pages=5, max_adapter_pages=0)
    simulation.add(make_request("a", prompt=17, max_tokens=1))
    simulation.step()
    simulation.add(make_request("b", prompt=(99, *range(10)), max_tokens=1))
    simulation.step()  # takes one free block and two of a's
    simulation.add(make_request("c", prompt=17, max_tokens=1))
    assert shares(simulation.step()) == {"c": (8, 17)}


# -- preemption -------------------------------------------------------------------------------------------------------


def tight(policy: object, num_blocks: int, **settings: object) -> CheckedReplica:
    return sharing(policy, num_pages=num_blocks, max_adapter_pages=0, **settings)


@pytest.mark.usefixtures("no_kv_admission")
def test_requests_that_share_all_blocks_are_preempted_together() -> None:
    # x and y share three blocks and have one each; z needs four of six.
    simulation = tight(Script("x", "xy", "z"), 6)
    simulation.add(make_request("z", prompt=tuple(range(50, 66)), max_tokens=1))
    simulation.add(make_request("x", prompt=13, max_tokens=4), make_request("y", prompt=13, max_tokens=4))
    simulation.step()
    simulation.step()
    assert simulation.allocator.num_free_blocks == 1
    assert set(preempted(simulation.step())) == {"x", "y"}
    simulation.run()
    assert all(last(simulation, name).finish_reason == "length" for name in "xyz")


@pytest.mark.usefixtures("no_kv_admission")
def test_a_request_that_shares_all_blocks_is_not_preempted_alone() -> None:
    simulation = tight(Script("xw", "y", "z"), 6, max_step_tokens=10)
    simulation.add(make_request("z", prompt=tuple(range(90, 99)), max_tokens=1))
    simulation.add(make_request("x", prompt=13), make_request("y", prompt=(80, 81, 82, 83, 84)))
    simulation.add(make_request("w", prompt=13))
    simulation.scheduler.admit(frozenset())
    simulation.clock.now += 20
    assert shares(simulation.step()) == {"x": (0, 9), "w": (0, 1)}
    simulation.step()
    assert simulation.block_manager.table("w") == simulation.block_manager.table("x")[:2], (
        "w reuses the blocks that x computed"
    )
    assert simulation.allocator.num_free_blocks == 1
    assert preempted(simulation.step()) == ("y",), "w is newer, but preempting it would free no block"
    simulation.run()


@pytest.mark.usefixtures("no_kv_admission")
def test_a_preempted_request_resumes_from_its_cached_blocks() -> None:
    simulation = tight(Script("x", "x", "x", "y", "x"), 3)
    simulation.add(make_request("y", prompt=(40, 41, 42, 43, 44), max_tokens=1))
    simulation.add(make_request("x", prompt=6, max_tokens=5))
    for _ in range(3):
        simulation.step()
    assert preempted(simulation.step()) == ("x",)
    # Two blocks hold its first eight tokens; y took the free block and the later of the two.
    assert shares(simulation.step()) == {"x": (4, 9)}
    simulation.run()
    tokens = [token for output in simulation.outputs["x"] for token in output.token_ids]
    assert tokens == [sampled_token("x", place) for place in range(5)]
