"""More adapters than memory holds: each stays for a quantum, and none blocks another forever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.simulation import Machine, Simulation, Speed, make_request
from vlora.orchestrator import POLICIES, make_policy
from vlora.orchestrator.residency_quantum import Stays
from vlora.types import MemoryView


def view(resident: str, loading: str = "") -> MemoryView:
    return MemoryView(resident=frozenset(resident), mergeable=frozenset(), loading=frozenset(loading))


def test_a_stay_is_worth_what_bringing_took() -> None:
    stays = Stays()
    stays.see(view("", "a"), 0.0)
    stays.see(view("", "ab"), 1.0)
    stays.see(view("a", "b"), 4.0)  # loaded in 4 s: an eighth of it counts, and the quantum is eight times that
    assert not stays.is_over("a", 7.9) and stays.is_over("a", 8.0)
    stays.see(view("ab"), 5.0)  # another 4 s: 0.5 + (4 - 0.5) / 8
    assert not stays.is_over("b", 5.0 + 8 * 0.9375 - 0.1) and stays.is_over("b", 5.0 + 8 * 0.9375)
    assert not stays.is_over("unknown", 100.0)


def test_time_without_being_on_its_way_is_no_bringing() -> None:
    stays = Stays()
    stays.see(view("", "a"), 0.0)  # loading
    stays.see(view(""), 1.0)  # does not fit
    stays.see(view("", "a"), 90.0)
    stays.see(view("a"), 91.0)
    assert stays.is_over("a", 92.0) and not stays.is_over("a", 91.9)


def test_who_left_and_comes_again_stays_anew() -> None:
    stays = Stays()
    stays.see(view("", "a"), 0.0)
    stays.see(view("a"), 1.0)
    stays.see(view(""), 50.0)
    stays.see(view("a"), 51.0)
    assert not stays.is_over("a", 51.5)


def test_a_machine_that_brings_at_once_needs_no_stays() -> None:
    stays = Stays()
    stays.see(view("a"), 3.0)
    assert stays.is_over("a", 3.0)


@settings(max_examples=15)
@given(
    policy=st.sampled_from(sorted(POLICIES.keys() - {"merged_only"})),
    num_adapters=st.integers(2, 6),
    num_places=st.integers(1, 3),
    load_s=st.sampled_from([0.01, 0.05]),
    each=st.integers(1, 2),
)
def test_nobody_waits_for_an_adapter_longer_than_all_stays_before_it(
    policy: str, num_adapters: int, num_places: int, load_s: float, each: int
) -> None:
    """Answers are much longer than a quantum; without quanta the last adapters would wait for all of them."""
    machine = Machine(
        num_pages=200,
        max_adapter_pages=num_places,
        max_batch_size=32,
        max_step_tokens=128,
        theta_s=0.05,
        adapters={f"a{i}": 1 for i in range(num_adapters)},
        load_s=load_s,
        speed=Speed(step=0.05, token=0.0, lane=0.0, context=0.0, merge=0.01),
    )
    simulation = Simulation(machine, policy=make_policy(policy))
    requests = [make_request(f"r{i}-{n}", f"a{i}", max_tokens=60) for n in range(each) for i in range(num_adapters)]
    simulation.add(*requests)
    simulation.run()
    bring_s = num_places * load_s + 0.1  # with as many loads as slots; the last one is observed one step late
    rounds = math.ceil(num_adapters / num_places)
    for request in requests:
        timings = simulation.outputs[request.request_id][-1].timings
        assert timings is not None and timings.ttft_s is not None
        assert timings.ttft_s <= 0.3 + rounds * (9 * bring_s + 0.5)


@pytest.mark.parametrize("policy", ["vlora", "unmerged_only"])
def test_adapters_are_brought_for_several_steps(policy: str) -> None:
    """Twelve adapters on a machine with room for three."""
    machine = Machine(
        num_pages=200,
        max_adapter_pages=3,
        max_batch_size=16,
        theta_s=0.05,
        adapters={f"a{i}": 1 for i in range(12)},
        load_s=0.05,
        speed=Speed(step=0.02, token=0.0, lane=0.0, context=0.0, merge=0.02),
    )
    simulation = Simulation(machine, policy=make_policy(policy))
    simulation.add(*[make_request(f"r{i}", f"a{i % 12}", max_tokens=20) for i in range(48)])
    simulation.run()
    assert simulation.loader.num_loads < 48, "fewer than one load per request; answers take 20 steps"
