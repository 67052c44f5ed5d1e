"""Replays: no request is lost, times are right, many adapters and replicas work, decisions are fast."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from vlora.errors import BadConfig
from vlora.orchestrator import POLICIES, Costs
from vlora.simulator import MEASURED, Arrival, ClusterConfig, ReplicaConfig, make_workload, read_costs, replay
from vlora.simulator.commands import lines, simulate
from vlora.simulator.replica import Replica

COSTS = Costs(base_s=0.1, token_s=0.001, lane_s=0.0045, long_lane_s=0.0005, merge_s=0.2, short_lane=8)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_arrival_is_answered_under_every_policy(policy: str) -> None:
    arrivals = make_workload("hottest:rate=1").arrivals(60, 5, 0)
    found = replay(arrivals, ReplicaConfig(costs=COSTS, policy=policy, resident_adapters=3)).as_dict()
    assert found["requests"] == 60 and found["refused"] == 0
    assert found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] <= found["simulated_s"]
    assert sum(found["steps_by_mode"].values()) == pytest.approx(1)


def test_one_request_takes_the_time_of_its_steps() -> None:
    box = ReplicaConfig(costs=COSTS, load_s=0.5, policy="unmerged_only")
    found = replay([Arrival(3.0, "a", 100, 3)], box).as_dict()
    first = 0.5 + 0.1 + 100 * 0.0015
    latency = first + 2 * (0.1 + 0.001 + 0.0045)
    assert found["ttft_s"]["p50"] == pytest.approx(first)
    assert found["mean_latency_s"] == pytest.approx(latency)
    assert found["average_token_latency_ms"] == pytest.approx(1e3 * latency / 103)
    assert found["simulated_s"] == pytest.approx(3.0 + latency)


def test_steps_continue_during_a_load() -> None:
    box = ReplicaConfig(costs=COSTS, load_s=0.5, policy="unmerged_only")
    alone = replay([Arrival(3.0, None, 100, 20)], box).as_dict()
    both = replay([Arrival(3.0, None, 100, 20), Arrival(3.0, "a", 1, 1)], box).as_dict()
    # The base model's request answers long before 3.5 s; only the adapter's request waits for the load.
    assert both["ttft_s"]["p50"] == pytest.approx(alone["ttft_s"]["p50"])
    assert both["ttft_s"]["p99"] > 0.5


def test_the_longest_wait_and_the_waiting_bound_are_measured() -> None:
    """Merged only: the second request waits for the first, one step for its prompt and 29 decode steps."""
    arrivals = [Arrival(0.0, "a", 10, 30), Arrival(0.0, "b", 10, 1)]
    found = replay(arrivals, ReplicaConfig(costs=COSTS, policy="merged_only"))
    assert found.longest_wait_s == pytest.approx(0.2 + 30 * 0.1 + (10 + 29) * 0.001)
    assert found.wait_bound_s < 2
    kept = replay(arrivals, ReplicaConfig(costs=COSTS, policy="unmerged_only"))
    assert kept.longest_wait_s <= kept.wait_bound_s


def test_loads_are_sequential() -> None:
    box = ReplicaConfig(costs=COSTS, load_s=10.0, policy="unmerged_only")
    found = replay([Arrival(0.0, name, 1, 1) for name in "abc"], box).as_dict()
    assert found["adapter_loads"] == 3 and 30 < found["simulated_s"] < 31


def test_a_request_that_cannot_fit_is_refused() -> None:
    box = ReplicaConfig(costs=COSTS, kv_tokens=64)
    found = replay([Arrival(0.0, "a", 100, 3), Arrival(0.0, "a", 10, 3)], box).as_dict()
    assert (found["requests"], found["refused"]) == (1, 1)


@pytest.mark.parametrize("replicas", [1, 3])
def test_overload_with_a_deadline_is_refused_in_part(replicas: int) -> None:
    workload = make_workload("hottest:rate=20,answer_min=5,answer_max=30")
    cluster = ClusterConfig(replicas=replicas, rule="least_loaded")
    found = replay(workload.arrivals(200, 5, 0), ReplicaConfig(costs=COSTS, max_ttft_s=4.0), cluster).as_dict()
    assert found["requests"] + found["unreachable"] == 200 and found["unreachable"] > 40
    assert found["late"] <= 0.05 * found["requests"]
    assert found["refusal_s"]["p99"] <= 4.0


@pytest.mark.slow
def test_with_a_deadline_each_load_serves_several_requests() -> None:
    """Sixty adapters on a box for eight: each load serves several requests, not one step; without a bound each load
    serves several steps.
    """
    workload = make_workload("gamma:rate=3,alpha=0.3,answer_min=5,answer_max=30")
    found = replay(
        workload.arrivals(400, 60, 0), ReplicaConfig(costs=COSTS, load_s=0.3, resident_adapters=8, max_ttft_s=8.0)
    )
    roomy = replay(
        workload.arrivals(400, 60, 0), ReplicaConfig(costs=COSTS, load_s=0.3, resident_adapters=60, max_ttft_s=8.0)
    )
    unbounded = replay(workload.arrivals(400, 60, 0), ReplicaConfig(costs=COSTS, load_s=0.3, resident_adapters=8))
    assert found.num_loads < found.num_finished
    assert unbounded.num_loads < unbounded.num_finished
    assert unbounded.num_finished / unbounded.end_s > 0.6 * roomy.num_finished / roomy.end_s
    assert found.num_finished / found.end_s > 0.6 * roomy.num_finished / roomy.end_s
    assert found.num_late <= 0.05 * found.num_finished


def test_a_deadline_counts_from_arrival() -> None:
    """A step of 100 s is running when the second request arrives; its bound has passed when the step ends."""
    costs = Costs(base_s=100.0)
    arrivals = [Arrival(0.0, "a", 10, 5), Arrival(1.0, "a", 10, 1, max_ttft_s=50.0), Arrival(2.0, "a", 10, 1)]
    found = replay(arrivals, ReplicaConfig(costs=costs)).as_dict()
    assert (found["requests"], found["unreachable"], found["late"]) == (2, 1, 0)


def test_replicas_share_the_load() -> None:
    workload = make_workload("hottest:rate=2")
    alone, shared = (
        replay(workload.arrivals(80, 5, 0), ReplicaConfig(costs=COSTS), ClusterConfig(replicas=n)).as_dict()
        for n in (1, 4)
    )
    assert shared["requests"] == 80
    assert shared["mean_latency_s"] < 0.7 * alone["mean_latency_s"]


def test_moving_kv_to_make_room_takes_time() -> None:
    """One long base-model request extends into the adapters' part of memory; pages above it are free by then."""

    def adapter_waits_s(move_s: float) -> float:
        replica = Replica(
            ReplicaConfig(costs=COSTS, resident_adapters=4, kv_tokens=16 * 10, block_size=16, move_s=move_s)
        )
        replica.add("short", Arrival(0.0, None, 16 * 3, 1))
        replica.add("long", Arrival(0.0, None, 16 * 9, 16))
        replica.run_until(COSTS.base_s / 2)  # one step: the short request has ended
        for number in range(4):
            replica.add(str(number), Arrival(0.0, f"a{number}", 16, 1))
        before = replica.clock.now
        assert replica.decide() is not None
        assert replica.adapter_cache.resident == {"a0", "a1", "a2", "a3"}
        return replica.clock.now - before

    assert adapter_waits_s(0.0) == 0.0
    assert adapter_waits_s(0.5) == pytest.approx(2 * 0.5), "two of its blocks were there"


def test_every_distinct_adapter_is_loaded_once() -> None:
    arrivals = make_workload("punica:pattern=distinct,rate=1,answer_min=1,answer_max=2").arrivals(300, 1, 0)
    found = replay(arrivals, ReplicaConfig(costs=COSTS, resident_adapters=8)).as_dict()
    assert found["requests"] == found["adapter_loads"] == 300


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_with_a_thousand_waiting_takes_milliseconds(policy: str) -> None:
    """The target is 2 ms (`vlora bench policy` measures it); the margin here is for busy machines."""
    replica = Replica(ReplicaConfig(costs=COSTS, policy=policy, resident_adapters=100, kv_tokens=10**6))
    for number in range(1000):
        replica.add(str(number), Arrival(0.0, f"adapter-{number % 100}", 256, 1000))
    spent = []
    for _ in range(15):
        started = time.process_time()
        batch = replica.decide()
        spent.append(time.process_time() - started)
        assert batch is not None
        replica.record(batch)
    assert statistics.median(spent) < 0.01


def test_the_cost_based_policy_wins_with_a_hot_adapter() -> None:
    workload = make_workload("hottest:rate=0.7,skew=0.6")
    latency = {
        policy: replay(workload.arrivals(120, 20, 0), ReplicaConfig(costs=COSTS, policy=policy)).average_token_latency_s
        for policy in POLICIES
    }
    assert latency["cost_based"] <= 1.03 * min(latency.values())
    assert latency["cost_based"] < 0.9 * latency["unmerged_only"]


def test_invalid_costs_are_reported_by_name(tmp_path: Path) -> None:
    costs, load_s = read_costs(MEASURED)
    assert costs.base_s > 0 and load_s > 0
    path = tmp_path / "costs.json"
    good = {**costs._asdict(), "load_s": 0.1}
    for bad, message in (
        ({**good, "token_s": -1}, "costs.token_s is -1"),
        ({**good, "merge_s": "long"}, "costs.merge_s is 'long'"),
        ({**good, "base_s": 0}, "costs.base_s is 0"),
        ({}, "costs.base_s is None"),
    ):
        path.write_text(json.dumps({"costs": bad}))
        with pytest.raises(BadConfig, match=message):
            read_costs(path)
    path.write_text("[")
    with pytest.raises(BadConfig, match="not JSON"):
        read_costs(path)


def run_command(trace: str, **arguments: Any) -> dict[str, Any]:
    """The command with the defaults of its options."""
    defaults: dict[str, Any] = {"num_adapters": 4, "num_requests": 20, "num_tenants": 0, "seed": 0, "costs": None}
    defaults |= {"quick": None, "policy": None, "settings": {}, "cluster": {}}
    return simulate(trace, **defaults | arguments)


def test_the_command_reports_its_measures() -> None:
    found = run_command("hottest:rate=0.5", policy="cost_based", settings={"kv_tokens": 65_536})
    assert found["requests"] == 20 and found["policy"] == "cost_based" and found["routing"] is None
    text = "\n".join(lines(found))
    assert "average token latency" in text and "1 replica\n" in text and "bound on" not in text
    settings = {"max_ttft_s": 2.0, "weight": ("*=1",)}
    found = run_command("hottest:rate=50", num_requests=80, num_tenants=2, settings=settings)
    assert sum(tenant["requests"] for tenant in found["tenants"].values()) == found["requests"]
    assert "\n  tenant-1 " in "\n".join(lines(found))
    assert f"{found['unreachable']} refused as unreachable" in "\n".join(lines(found)) and found["unreachable"] > 20
    with pytest.raises(BadConfig, match="weight is 'adapter-0=none'"):
        run_command("gamma", settings={"weight": ("adapter-0=none",)})
    with pytest.raises(BadConfig, match="policy is 'fifo'"):
        run_command("gamma", policy="fifo")


def test_the_command_reports_on_many_replicas() -> None:
    cluster = {"replicas": 3, "rule": "placed", "mtbf_s": 20.0, "restart_s": 2.0}
    found = run_command("gamma:rate=2", num_requests=100, cluster=cluster)
    text = "\n".join(lines(found))
    assert "policy cost_based, 3 replicas, rule placed\n" in text and "switches" in text
    assert f"failed replicas        {found['routing']['failures']}; " in text and found["routing"]["failures"]
    assert f"computed again         {found['routing']['recomputed_tokens']} tokens" in text
    text = "gamma:rate=2,prefixes=3"
    found = run_command(text, num_requests=100, quick=True, cluster={"replicas": 2, "rule": "punica"})
    text = "\n".join(lines(found))
    assert "policy unmerged_only, 2 replicas, rule punica, stretches of unmerged steps\n" in text
    assert "switches" not in text and "longest wait" not in text and "prompt tokens reused" in text


def test_more_than_sixteen_replicas_are_quick_unless_a_policy_is_chosen() -> None:
    assert [run_command("gamma", cluster={"replicas": n})["quick"] for n in (16, 17)] == [False, True]
    assert run_command("gamma", cluster={"max_replicas": 17})["quick"]
    assert not run_command("gamma", cluster={"replicas": 17}, policy="dlora")["quick"]
    assert run_command("gamma", cluster={"replicas": 17}, policy="unmerged_only")["quick"]
    assert not run_command("gamma", cluster={"replicas": 17}, quick=False)["quick"]
    with pytest.raises(BadConfig, match="leave --policy dlora out"):
        run_command("gamma", quick=True, policy="dlora")
