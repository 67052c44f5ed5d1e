"""Admission by KV room: no throughput loss under overload, hardly any recomputation, and every request enters."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.orchestrator.checked_replica import SMALL_COSTS, CheckedReplica, CheckedReplicaConfig, all_resident
from tests.orchestrator.sample_requests import expected_tokens, make_request
from tests.orchestrator.test_properties import assert_answered, every_policy, longest_over_bound
from vlora.memory.block_manager import WrittenBlocks
from vlora.memory.page_allocator import PageAllocator
from vlora.orchestrator.admission.kv_admission import AnswerLengths, KvAdmission
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Request

ADAPTERS = {"a": 2, "b": 2, "c": 2}


def test_the_expected_length_is_the_mean_of_answers_at_least_as_long() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(0, 100) == lengths.expected(99, 100) == 100, "the full length before any has ended"
    for _ in range(500):
        lengths.observe(10, 160)
        lengths.observe(150, 160)
    # In sixteenths of 160 tokens, rounded up: 20 and 160.
    assert lengths.expected(0, 160) == 91, "the newest answer, a long one, has the largest weight"
    assert lengths.expected(30, 160) == 160
    assert lengths.expected(0, 16) == 9


# -- the order of entry -----------------------------------------------------------------------------------------------


class Room:
    """Requests that wait for eight blocks of four tokens. blocks_beside: of them, beside the adapters."""

    def __init__(self, requests: list[Request], blocks_beside: int = 8) -> None:
        self.blocks = WrittenBlocks(PageAllocator(8, 1), 4)
        self.admission = KvAdmission(self.blocks, blocks_beside, ())
        self.tracked = [TrackedRequest(request, 0.0, None) for request in requests]
        for number, t in enumerate(self.tracked):
            t.admit(number, 0.0)
            self.admission.add(t)

    def admit(self, *, adapter_starves: bool = False) -> list[str]:
        return [t.request_id for t in self.admission.admit(0.0, self.tracked, adapter_starves=adapter_starves)]

    def end(self, names: Iterable[str]) -> None:
        for t in [t for t in self.tracked if t.request_id in names]:
            self.admission.remove(t)
            self.tracked.remove(t)

    def order(self) -> list[str]:
        """The order of entry if the entered requests end before further ones may enter."""
        order: list[str] = []
        while len(self.admission):
            order += (entered := self.admit())
            assert entered
            self.end(entered)
        return order


def test_resumed_requests_enter_before_new_ones() -> None:
    """As preempted ones do; an answer that has begun must not stop for long."""
    requests = [make_request(f"new {number}", prompt=8, max_tokens=8, priority=5) for number in range(3)]
    resumed = msgspec.structs.replace(make_request("resumed", prompt=8, max_tokens=8), answered=(1, 2, 3))
    room = Room([*requests, resumed])
    assert [t.device_len for t in room.tracked] == [8, 8, 8, 11] and room.tracked[-1].num_sampled == 3
    assert room.order()[0] == "resumed"


def test_small_requests_do_not_overtake_a_large_one() -> None:
    room = Room([make_request(name, prompt=prompt) for name, prompt in (("small", 4), ("large", 28), ("tiny", 1))])
    assert room.admit() == ["small"]
    assert room.admission.blocks_short == 2, "large needs eight blocks beside the two of small"
    assert room.admit() == []
    room.end(["small"])
    assert room.admit() == ["large"]


@pytest.mark.parametrize(
    ("sizes", "blocks_beside", "starves", "number"),
    [
        # Maximum lengths add up to eleven blocks, but never at the same time: r0 ends when all have two blocks, r1 when
        # it and r2 have four each, and r2 ends with six.
        ([(4, 5), (4, 13), (4, 21)], 8, False, 3),
        # No request enters the adapters' part while an adapter starves.
        ([(8, 1)] * 3, 4, True, 2),
        ([(8, 1)] * 3, 4, False, 3),
    ],
)
def test_how_many_requests_enter(sizes: list[tuple[int, int]], blocks_beside: int, starves: bool, number: int) -> None:
    requests = [make_request(f"r{i}", prompt=prompt, max_tokens=tokens) for i, (prompt, tokens) in enumerate(sizes)]
    assert len(Room(requests, blocks_beside).admit(adapter_starves=starves)) == number


def test_blocks_that_a_step_in_flight_keeps_count_as_room() -> None:
    """They are freed after the step. A refusal for lack of them would last until another request ends."""
    room = Room([make_request(name, prompt=n, max_tokens=1) for name, n in (("r", 4), ("x", 16), ("y", 16))])
    assert room.admit() == ["r", "x"]
    for name, prompt in (("r", 4), ("x", 16)):
        assert room.blocks.grow(name, prompt)
    room.blocks.keep_written(["x"])
    room.blocks.free("x")
    room.end(["x"])
    assert room.admit() == ["y"]


@settings(max_examples=scaled(200))
@given(
    kinds=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from([-10, 0, 0, 5]), st.sampled_from([None, None, 9.0])),
        min_size=1,
        max_size=60,
    )
)
def test_the_nth_oldest_request_is_among_the_first_8n_to_enter(kinds: list[tuple[int, int, float | None]]) -> None:
    requests = [
        make_request(f"r{i}", prompt=prompt, priority=priority, max_ttft_s=bound_s)
        for i, (prompt, priority, bound_s) in enumerate(kinds)
    ]
    order = Room(requests).order()
    assert sorted(order) == sorted(request.request_id for request in requests)
    for number, request in enumerate(requests):
        assert order.index(request.request_id) < 8 * (number + 1)
    if len({(priority, bound_s) for _, priority, bound_s in kinds}) == 1:
        assert order == [request.request_id for request in requests], "equal ranks enter in order of arrival"


# -- overload ---------------------------------------------------------------------------------------------------------


@st.composite
def overloads(draw: st.DrawFn) -> tuple[CheckedReplicaConfig, list[Request]]:
    """KV room for a few requests, and several times as many requests."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    longest_prompt, longest_answer = draw(st.sampled_from([(64, 8), (32, 32), (8, 64)]))
    room = draw(st.integers(2, 12)) * -(-(longest_prompt + longest_answer) // block_size)
    limit = draw(st.integers(2, 16))
    machine = CheckedReplicaConfig(
        num_pages=6 + room,
        max_adapter_pages=6,
        block_size=block_size,
        max_batch_size=limit,
        max_step_tokens=limit + draw(st.sampled_from([16, 64, 256])),
        theta_s=draw(st.sampled_from([0.001, 0.1, 1.0])),
        adapters=ADAPTERS,
        costs=SMALL_COSTS._replace(
            merge_s=draw(st.sampled_from([0.0, 0.02])), long_adapter_s=draw(st.sampled_from([0.0, 0.01]))
        ),
        prefix_cache=draw(st.booleans()),
    )
    ends_early = draw(st.booleans())
    requests = [
        make_request(
            f"r{i}",
            draw(st.sampled_from([None, *ADAPTERS])),
            # All prompts differ from the first token, so recomputation depends on memory only.
            prompt=(100 + i, *range(2, 1 + draw(st.integers(longest_prompt // 2, longest_prompt)))),
            max_tokens=draw(st.integers(max(1, longest_answer // 4), longest_answer)),
            ignore_eos=not ends_early,
        )
        for i in range(draw(st.integers(12, 24)))
    ]
    return machine, requests


def fed(machine: CheckedReplicaConfig, policy: str, requests: list[Request]) -> CheckedReplica:
    """Submit each request once its maximum length fits beside those of all before it."""
    simulation = all_resident(machine, policy)
    room = simulation.block_manager.num_free_blocks
    waiting, sizes = list(requests), {r.request_id: simulation.block_manager.blocks_for(_length(r)) for r in requests}
    while waiting or simulation.scheduler.has_work:
        under_way = [name for name, found in simulation.outputs.items() if not (found and found[-1].finished)]
        held = sum(sizes[name] for name in under_way)
        while waiting and held + sizes[waiting[0].request_id] <= room:
            held += sizes[waiting[0].request_id]
            simulation.add(waiting.pop(0))
        simulation.step()
    return simulation


def _length(request: Request) -> int:
    return len(request.prompt_ids) + len(expected_tokens(request)) - 1


@pytest.mark.slow
@settings(max_examples=scaled(40))
@given(overload=overloads(), policy=every_policy)
def test_overload_keeps_throughput_and_recomputes_almost_nothing(
    overload: tuple[CheckedReplicaConfig, list[Request]], policy: str
) -> None:
    machine, requests = overload
    simulation = all_resident(machine, policy)
    simulation.run([(0.0, request) for request in requests])
    for request in requests:
        assert_answered(simulation, request)
    stats = simulation.stats
    assert stats.num_needed_tokens == sum(_length(request) for request in requests)
    assert stats.num_step_tokens <= 1.15 * stats.num_needed_tokens
    assert simulation.clock.now <= fed(machine, policy, requests).clock.now / 0.9
    if policy != "merged_only":
        assert longest_over_bound(simulation) <= 1e-9


def test_a_crowd_beyond_kv_memory_is_computed_once() -> None:
    """96 requests of 256 and 32 tokens, room for 24 of them, a batch of 32, steps longer than half of theta."""
    machine = CheckedReplicaConfig(
        num_pages=6 + 24 * 18,
        max_adapter_pages=6,
        block_size=16,
        max_batch_size=32,
        max_step_tokens=256,
        theta_s=0.1,
        adapters=ADAPTERS,
        costs=SMALL_COSTS._replace(base_s=0.05),
    )
    simulation = all_resident(machine, "cost_based")
    simulation.add(*(make_request(f"r{i}", "abc"[i % 3], prompt=256, max_tokens=32) for i in range(96)))
    assert simulation.stats.num_waiting_for_kv == 96
    simulation.step()
    assert simulation.stats.num_waiting_for_kv == 96 - 24
    simulation.run()
    stats = simulation.stats
    assert stats.num_preemptions == 0 and stats.num_step_tokens == stats.num_needed_tokens == 96 * (256 + 31)
