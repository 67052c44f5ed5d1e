"""Tenants in replays: their assignment, and the share that each receives under contention."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from vlora.orchestrator import POLICIES, Costs
from vlora.simulator import Arrival, ClusterConfig, ReplicaConfig, make_workload, replay
from vlora.simulator.commands import lines
from vlora.simulator.replica import Replica
from vlora.simulator.tenants import contested_shares
from vlora.simulator.workloads import among_tenants

COSTS = Costs(base_s=0.1, token_s=0.001, lane_s=0.0045, long_lane_s=0.0005, merge_s=0.2, short_lane=8)
BOUNDED = sorted(POLICIES.keys() - {"merged_only"})


def test_tenants_are_drawn_by_a_power_law() -> None:
    workload = make_workload("hottest:rate=2")
    plain = list(workload.arrivals(6000, 5, 0))
    drawn = list(among_tenants(plain, 3, 0))
    assert [arrival._replace(tenant=None) for arrival in drawn] == plain
    assert drawn == list(among_tenants(plain, 3, 0)) != list(among_tenants(plain, 3, 1))
    found = Counter(arrival.tenant for arrival in drawn)
    assert [found[f"tenant-{i}"] / 6000 for i in range(3)] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)


def test_a_given_tenant_is_kept() -> None:
    named, drawn = among_tenants([Arrival(0.0, "a", 1, 1, tenant="north"), Arrival(0.0, "a", 1, 1)], 1, 0)
    assert (named.tenant, drawn.tenant) == ("north", "tenant-0")


def crowd(num_requests: int, num_alone: int) -> list[Arrival]:
    """Two tenants send the same number of requests at once; the second sends a few more when all are done."""
    lengths = [(20 + number % 7, 10 + number % 5) for number in range(num_requests)]
    both = [Arrival(0.0, "a", *each, tenant=tenant) for each in lengths for tenant in ("north", "south")]
    return both + [Arrival(1e4, "a", 20, 10, tenant="south")] * num_alone


@pytest.mark.parametrize("policy", BOUNDED)
def test_shares_under_contention_follow_the_weights(policy: str) -> None:
    """Both get all answers in the end; under contention one gets three times as much as the other."""
    box = ReplicaConfig(costs=COSTS, policy=policy, max_batch_size=4, tenant_weight=("north=3", "south=1"))
    found = replay(crowd(60, 5), box).as_dict()
    north, south = found["tenants"]["north"], found["tenants"]["south"]
    assert (north["requests"], south["requests"]) == (60, 65) and found["requests"] == 125
    assert north["tokens"] + south["tokens"] == found["tokens"]
    # Until the first has no requests left: then there is no contention, and further service counts for neither.
    assert north["share"] == pytest.approx(0.75, abs=0.04)
    assert north["share"] + south["share"] == pytest.approx(1)
    assert north["ttft_s"]["p50"] < south["ttft_s"]["p50"] and north["mean_latency_s"] < south["mean_latency_s"]


def test_without_weights_shares_follow_the_demand() -> None:
    arrivals = [Arrival(0.0, "a", 20, 10, tenant=tenant) for tenant in itertools.islice(itertools.cycle("nns"), 120)]
    found = replay(arrivals, ReplicaConfig(costs=COSTS, policy="unmerged_only", max_batch_size=6)).as_dict()["tenants"]
    assert (found["n"]["share"], found["s"]["share"]) == pytest.approx((2 / 3, 1 / 3), abs=0.02)


def test_a_tenant_without_contention_has_no_share() -> None:
    arrivals = [Arrival(0.0, "a", 10, 3, tenant="n"), Arrival(1e3, "a", 10, 3, tenant="s"), Arrival(2e3, None, 10, 3)]
    found = replay(arrivals, ReplicaConfig(costs=COSTS)).as_dict()
    assert {name: (tenant["requests"], tenant["share"]) for name, tenant in found["tenants"].items()} == {
        "n": (1, None),
        "s": (1, None),
    }
    assert replay([Arrival(0.0, "a", 10, 3)], ReplicaConfig(costs=COSTS)).as_dict()["tenants"] == {}


def test_requests_without_a_tenant_compete_as_one_tenant() -> None:
    replica = Replica(ReplicaConfig(costs=COSTS, policy="unmerged_only"))
    replica.add("0", Arrival(0.0, None, 30, 1, tenant="n"))
    replica.add("1", Arrival(0.0, None, 10, 1))
    assert len(replica.run_until(1e3)) == 2
    assert contested_shares([replica.contention]) == {"n": pytest.approx(0.75)}


def test_refusals_are_counted_by_tenant() -> None:
    arrivals = [Arrival(0.0, "a", 400, 5, max_ttft_s=2.0, tenant=tenant) for tenant in "ns" * 20]
    found = replay(arrivals, ReplicaConfig(costs=COSTS)).as_dict()
    by_tenant = found["tenants"].values()
    assert found["unreachable"] > 10 and sum(each["unreachable"] for each in by_tenant) == found["unreachable"]


def test_a_tenant_without_answers_has_no_time_to_first_token() -> None:
    arrivals = [Arrival(0.0, "a", 10, 5, tenant="n"), Arrival(0.05, "a", 10, 5, max_ttft_s=0.01, tenant="s")]
    found = replay(arrivals, ReplicaConfig(costs=COSTS)).as_dict()
    text = "\n".join(lines({"trace": "t", "policy": "algorithm1", "replicas": 1, "quick": False, **found}))
    assert "1 answered, 0 refused" in text and "0 answered, 1 refused" in text
    assert text.count("time to first token") == 2, "all together, and the answered tenant"


def test_shares_are_summed_over_replicas() -> None:
    box = ReplicaConfig(costs=COSTS, max_batch_size=4, tenant_weight=("north=3", "south=1"))
    together = [arrival for arrival in crowd(60, 0) for _ in range(2)]  # both tenants on each box
    found = replay(together, box, ClusterConfig(replicas=2, rule="least_loaded")).as_dict()["tenants"]
    assert found["north"]["share"] == pytest.approx(0.75, abs=0.06)
