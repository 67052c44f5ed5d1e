"""More adapters than memory holds: each stays for a quantum, and none blocks another forever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.orchestrator.checked_replica import CheckedReplica, CheckedReplicaConfig
from tests.orchestrator.sample_requests import make_request
from vlora.orchestrator import POLICIES, Costs, make_policy
from vlora.orchestrator.residency_quantum import ResidencyQuantum
from vlora.types import MemoryView


def view(resident: str, loading: str = "") -> MemoryView:
    return MemoryView(resident=frozenset(resident), mergeable=frozenset(), loading=frozenset(loading))


def test_the_quantum_is_a_multiple_of_the_load_time() -> None:
    quantum = ResidencyQuantum()
    quantum.observe(view("", "a"), 0.0)
    quantum.observe(view("", "ab"), 1.0)
    quantum.observe(view("a", "b"), 4.0)  # loaded in 4 s: an eighth of it counts, and the quantum is eight times that
    assert not quantum.has_expired("a", 7.9) and quantum.has_expired("a", 8.0)
    quantum.observe(view("ab"), 5.0)  # another 4 s: 0.5 + (4 - 0.5) / 8
    assert not quantum.has_expired("b", 5.0 + 8 * 0.9375 - 0.1) and quantum.has_expired("b", 5.0 + 8 * 0.9375)
    assert not quantum.has_expired("unknown", 100.0)


def test_time_without_a_running_load_is_not_load_time() -> None:
    quantum = ResidencyQuantum()
    quantum.observe(view("", "a"), 0.0)  # loading
    quantum.observe(view(""), 1.0)  # does not fit
    quantum.observe(view("", "a"), 90.0)
    quantum.observe(view("a"), 91.0)
    assert quantum.has_expired("a", 92.0) and not quantum.has_expired("a", 91.9)


def test_the_quantum_restarts_when_an_adapter_is_loaded_again() -> None:
    quantum = ResidencyQuantum()
    quantum.observe(view("", "a"), 0.0)
    quantum.observe(view("a"), 1.0)
    quantum.observe(view(""), 50.0)
    quantum.observe(view("a"), 51.0)
    assert not quantum.has_expired("a", 51.5)


def test_the_quantum_is_zero_where_loads_take_no_time() -> None:
    quantum = ResidencyQuantum()
    quantum.observe(view("a"), 3.0)
    assert quantum.has_expired("a", 3.0)


@settings(max_examples=scaled(15))
@given(
    policy=st.sampled_from(sorted(POLICIES.keys() - {"merged_only"})),
    num_adapters=st.integers(2, 6),
    num_places=st.integers(1, 3),
    load_s=st.sampled_from([0.01, 0.05]),
    each=st.integers(1, 2),
)
def test_the_wait_for_an_adapter_is_bounded_by_the_quanta_before_it(
    policy: str, num_adapters: int, num_places: int, load_s: float, each: int
) -> None:
    """Answers are much longer than a quantum; without quanta the last adapters would wait for all of them."""
    machine = CheckedReplicaConfig(
        num_pages=200,
        max_adapter_pages=num_places,
        max_batch_size=32,
        max_step_tokens=128,
        theta_s=0.05,
        adapters={f"a{i}": 1 for i in range(num_adapters)},
        load_s=load_s,
        costs=Costs(base_s=0.05, merge_s=0.01),
    )
    simulation = CheckedReplica(machine, policy=make_policy(policy))
    requests = [make_request(f"r{i}-{n}", f"a{i}", max_tokens=60) for n in range(each) for i in range(num_adapters)]
    simulation.add(*requests)
    simulation.run()
    bring_s = num_places * load_s + 0.1  # with as many loads as slots; the last one is observed one step late
    rounds = math.ceil(num_adapters / num_places)
    for request in requests:
        timings = simulation.outputs[request.request_id][-1].timings
        assert timings is not None and timings.ttft_s is not None
        assert timings.ttft_s <= 0.3 + rounds * (9 * bring_s + 0.5)


@pytest.mark.parametrize("policy", ["algorithm1", "unmerged_only"])
def test_an_adapter_is_loaded_for_several_steps(policy: str) -> None:
    """Twelve adapters on a machine with room for three."""
    machine = CheckedReplicaConfig(
        num_pages=200,
        max_adapter_pages=3,
        max_batch_size=16,
        theta_s=0.05,
        adapters={f"a{i}": 1 for i in range(12)},
        load_s=0.05,
        costs=Costs(base_s=0.02, merge_s=0.02),
    )
    simulation = CheckedReplica(machine, policy=make_policy(policy))
    simulation.add(*[make_request(f"r{i}", f"a{i % 12}", max_tokens=20) for i in range(48)])
    simulation.run()
    assert simulation.loader.num_loads < 48, "fewer than one load per request; answers take 20 steps"
