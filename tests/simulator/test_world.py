"""Many replicas: quick ones agree with exact ones; nothing is lost in failures, moves and changes of their number."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.routing.integrity import check_integrity
from vlora.errors import BadConfig
from vlora.orchestrator.cost_model import Costs
from vlora.routing import RULES
from vlora.simulator.arrivals import Arrival
from vlora.simulator.cluster_config import ClusterConfig
from vlora.simulator.machine import MEASURED, read_costs
from vlora.simulator.measures import Measures
from vlora.simulator.replica import ReplicaConfig
from vlora.simulator.workloads import make_workload
from vlora.simulator.world import World, replay

COSTS = Costs(base_s=0.1, token_s=0.001, lane_s=0.0045, long_lane_s=0.0005, merge_s=0.2, short_lane=8)
# Steps of a 7 B model on a large GPU.
FAST = Costs(base_s=0.018, token_s=0.000075, lane_s=2e-5, long_lane_s=1e-5, context_token_s=1.2e-7, merge_s=0.01)
UNMERGED = ReplicaConfig(costs=COSTS, policy="unmerged_only")


def both(text: str, number: int, config: ReplicaConfig, **settings: Any) -> tuple[Measures, Measures]:
    """The same arrivals on exact and on quick replicas."""
    exact, quick = (
        replay(make_workload(text).arrivals(number, 20, 0), config, ClusterConfig(quick=quick, **settings))
        for quick in (False, True)
    )
    assert exact.num_finished == quick.num_finished == number
    return exact, quick


@pytest.mark.parametrize(
    ("text", "changes", "settings"),
    [
        ("gamma:rate=0.6", {}, {}),
        ("gamma:rate=1.6", {"load_s": 0.16}, {"replicas": 4, "rule": "least_loaded"}),
        ("gamma:rate=1.6", {"load_s": 0.16, "resident_adapters": 6}, {"replicas": 4}),
        ("hottest:rate=2", {}, {"replicas": 4, "rule": "punica"}),
        ("gamma:rate=1.6,prefixes=12,prefix_tokens=160", {"prefix_cache": True}, {"replicas": 4}),
    ],
    ids=["one", "least loaded", "few adapters", "punica", "prefixes"],
)
def test_quick_replicas_agree_with_exact_ones(text: str, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    costs, _ = read_costs(MEASURED)
    config = ReplicaConfig(costs=costs, policy="unmerged_only", **changes)
    exact, quick = both(text, 200, config, **settings)
    assert quick.average_token_latency_s == pytest.approx(exact.average_token_latency_s, rel=0.03)
    assert quick.as_dict()["ttft_s"]["p50"] == pytest.approx(exact.as_dict()["ttft_s"]["p50"], rel=0.15)
    assert quick.num_loads == pytest.approx(exact.num_loads, rel=0.2)
    assert quick.num_reused == pytest.approx(exact.num_reused, rel=0.1)
    assert bool(exact.num_reused) == ("prefixes" in text)


def test_quick_replicas_refuse_images() -> None:
    with pytest.raises(BadConfig, match="quick replicas do not simulate images"):
        replay([Arrival(0.0, None, 50, 1, images=(16,))], UNMERGED, ClusterConfig(quick=True))


def test_a_request_alone_takes_the_same_steps_in_both() -> None:
    for arrival in (Arrival(3.0, "a", 1200, 40), Arrival(0.5, None, 30, 1), Arrival(0.0, "a", 700, 0)):
        exact, quick = (replay([arrival], UNMERGED, ClusterConfig(quick=quick)).as_dict() for quick in (False, True))
        for name in ("simulated_s", "mean_latency_s", "ttft_s", "steps", "tokens", "adapter_loads"):
            assert quick[name] == pytest.approx(exact[name]), name


def crowd(number: int, rate: float, seed: int = 0) -> list[Arrival]:
    text = f"gamma:rate={rate},prompt_min=20,prompt_max=200,answer_min=1,answer_max=60"
    return list(make_workload(text).arrivals(number, 12, seed))


@pytest.mark.parametrize(
    ("rule", "quick"),
    [
        pytest.param(rule, quick, marks=() if place % 2 == quick else pytest.mark.exhaustive)
        for place, rule in enumerate(RULES)
        for quick in (False, True)
    ],
)
def test_all_requests_are_answered_while_replicas_fail(rule: str, quick: bool) -> None:
    cluster = ClusterConfig(
        replicas=3, rule=rule, quick=quick, mtbf_s=15.0, restart_s=3.0, detect_s=0.7, report_s=0.5, report_age_s=1.0
    )
    config = dataclasses.replace(UNMERGED, load_s=0.1, resident_adapters=4, max_batch_size=6)
    world = World(config, cluster)
    found = world.run(crowd(150, 3.0))
    check_integrity(world.router)
    assert found.num_finished == 150 and world.router.num_waiting == 0
    assert found.num_failures > 3 and found.num_resubmitted > 3 and found.num_recomputed > 100
    steady = replay(crowd(150, 3.0), config, ClusterConfig(replicas=3, rule=rule, quick=quick))
    assert steady.num_failures == 0 and steady.latency_s < found.latency_s


def test_all_replicas_may_fail_at_once() -> None:
    found = replay(crowd(30, 5.0), UNMERGED, ClusterConfig(replicas=2, mtbf_s=4.0, restart_s=1.0, detect_s=5.0))
    assert found.num_finished == 30


@pytest.mark.parametrize("quick", [False, True])
def test_moved_requests_continue_their_answers(quick: bool) -> None:
    """Two replicas with one long answer each, which are consolidated after ten seconds."""
    arrivals = [Arrival(0.0, "a", 50, 300), Arrival(0.0, None, 50, 4), Arrival(0.1, "b", 50, 300)]
    config = dataclasses.replace(UNMERGED, max_batch_size=2)
    cluster = ClusterConfig(replicas=2, rule="punica", quick=quick)
    found, stay = (replay(arrivals, config, dataclasses.replace(cluster, consolidate_s=s)) for s in (10.0, 0.0))
    assert (found.num_moves, stay.num_moves) == (1, 0)
    assert found.num_finished == 3 and 100 < found.num_recomputed < 200, "the prompt, and some hundred answered tokens"
    steps = found.as_dict()["steps"]
    assert steps < 0.8 * stay.as_dict()["steps"], "shared steps, none of them computed twice"
    assert found.active_s < 0.7 * stay.active_s


def test_requests_that_outgrow_a_replica_go_to_another() -> None:
    """Four answers grow beyond the memory of the replica that Punica's rule fills first."""
    arrivals = [Arrival(0.1 * number, "a", 100, 120) for number in range(4)]
    config = dataclasses.replace(UNMERGED, kv_tokens=640, max_batch_size=8)
    found = replay(arrivals, config, ClusterConfig(replicas=2, rule="punica", quick=True, consolidate_s=0))
    assert found.num_finished == 4 and found.num_evictions >= 1
    alone = replay(arrivals, config, ClusterConfig(quick=True))
    assert alone.num_finished == 4 and alone.as_dict()["preemptions"] >= 1


def test_replicas_are_added_and_released_by_the_load() -> None:
    """A minute of load for about three replicas between two quiet minutes; a replica serves ten seconds late."""
    draws = random.Random(0)
    times = [*range(0, 60, 6), *sorted(draws.uniform(60, 180) for _ in range(600)), *range(180, 420, 6)]
    arrivals = [Arrival(float(time_s), "a", 100, 60) for time_s in times]
    config = ReplicaConfig(costs=FAST, policy="unmerged_only", max_batch_size=4)
    for rule in ("punica", "placed"):
        cluster = ClusterConfig(
            replicas=1, max_replicas=6, rule=rule, quick=True, start_s=10.0, down_after_s=20.0, sample_s=1.0
        )
        found = replay(arrivals, config, cluster)
        numbers = {sample.time_s: len(sample.sizes) for sample in found.samples}
        assert found.num_finished == len(arrivals)
        assert numbers[59.0] == 1 and 3 <= numbers[170.0] <= 6, rule
        assert numbers[max(numbers)] == 1, f"{rule}: all but one are released in the end"
        first = next(time_s for time_s, number in numbers.items() if number > 1)
        assert 70 <= first <= 90
        few = replay(arrivals, config, ClusterConfig(replicas=1, quick=True))
        assert found.as_dict()["ttft_s"]["p90"] < 0.5 * few.as_dict()["ttft_s"]["p90"]


def test_late_reports_cost_little_because_they_are_corrected() -> None:
    arrivals = crowd(400, 40.0)
    config = ReplicaConfig(costs=FAST, policy="unmerged_only", max_batch_size=4, kv_tokens=1200)
    fresh, late = (
        replay(arrivals, config, ClusterConfig(replicas=4, quick=True, report_s=report_s, report_age_s=2 * report_s))
        for report_s in (0.0, 0.5)
    )
    assert late.num_finished == fresh.num_finished == 400 and fresh.most_waiting > 10
    assert late.latency_s < 1.15 * fresh.latency_s
    assert late.num_evictions <= 60


def test_requests_meet_where_their_prefix_is_known() -> None:
    """Twenty cameras send frames of their own scene; the rule with affinity computes fewer prompt tokens."""
    text = "gamma:rate=8,alpha=0,prefixes=20,prefix_tokens=512,prompt_min=600,prompt_max=640,answer_min=4,answer_max=8"
    config = ReplicaConfig(costs=FAST, policy="unmerged_only", prefix_cache=True, kv_tokens=8192)
    share = {}
    for rule in ("placed", "round_robin"):
        arrivals = (each._replace(adapter=None) for each in make_workload(text).arrivals(400, 1, 0))
        found = replay(arrivals, config, ClusterConfig(replicas=4, rule=rule, quick=True))
        share[rule] = found.num_reused / (400 * 512)
    assert share["placed"] > 0.85 and share["round_robin"] < share["placed"] - 0.1


def test_a_simulation_is_reproducible() -> None:
    cluster = ClusterConfig(replicas=4, quick=True, mtbf_s=10.0, report_s=0.2, report_age_s=1.0, rebalance_s=5.0)
    first, second = (replay(crowd(200, 10.0), UNMERGED, cluster).as_dict() for _ in range(2))
    assert first == second
    assert first != replay(crowd(200, 10.0), UNMERGED, dataclasses.replace(cluster, seed=1)).as_dict()


def random_settings(draws: random.Random) -> tuple[ReplicaConfig, ClusterConfig]:
    """Few and small replicas, of which some fail, are added, released or report late."""
    num_replicas = draws.randint(1, 4)
    config = dataclasses.replace(
        UNMERGED,
        load_s=draws.choice((0.0, 0.05, 0.5)),
        resident_adapters=draws.choice((1, 3, 8)),
        kv_tokens=draws.choice((320, 640, 4000)),
        max_batch_size=draws.choice((1, 3, 8)),
        max_step_tokens=draws.choice((32, 256)),
        prefix_cache=draws.random() < 0.3,
        max_ttft_s=draws.choice((None, None, 5.0)),
        tenant_weight=draws.choice(((), ("tenant-0=2",))),
    )
    cluster = ClusterConfig(
        replicas=num_replicas,
        max_replicas=draws.choice((None, num_replicas + 2)),
        rule=draws.choice(list(RULES)),
        quick=draws.random() < 0.7,
        consolidate_s=draws.choice((0.0, 1.0, 5.0)),
        replan_s=draws.choice((0.0, 5.0)),
        rebalance_s=draws.choice((0.0, 3.0)),
        report_s=draws.choice((0.0, 0.0, 0.3)),
        report_age_s=draws.choice((0.0, 1.0)),
        mtbf_s=draws.choice((0.0, 0.0, 8.0, 40.0)),
        detect_s=draws.choice((0.0, 1.0)),
        restart_s=draws.choice((0.0, 3.0)),
        start_s=2.0,
        up_after_s=1.0,
        down_after_s=4.0,
        seed=draws.randrange(1000),
    )
    return config, cluster


@settings(max_examples=scaled(30), deadline=None)
@given(seed=st.integers(0, 10**9))
def test_in_any_world_each_request_ends_once(seed: int) -> None:
    draws = random.Random(seed)
    config, cluster = random_settings(draws)
    text = f"gamma:rate={draws.choice((0.5, 3, 10))},prompt_min=40,prompt_max=120"
    text += f",answer_min={draws.choice((0, 1, 20))},answer_max=80"
    text += ",prefixes=3,prefix_tokens=32" * config.prefix_cache
    arrivals = [
        each._replace(priority=draws.choice((0, 0, 2)), tenant=draws.choice((None, "tenant-0", "tenant-1")))
        for each in make_workload(text).arrivals(60, 6, seed)
    ]
    world = World(config, cluster)
    found = world.run(arrivals)
    check_integrity(world.router)
    assert found.num_finished + found.num_refused + found.num_unreachable == 60
    assert world.router.num_waiting == 0
    assert not any(replica.holds for replica in world.router.replicas.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 4, "max_replicas": 3}, "max_replicas is 3"),
        ({"rule": "random"}, "rule is 'random'; choose one of placed"),
        ({"over": 0.9}, "over is 0[.]9"),
        ({"mtbf_s": -1.0}, "mtbf_s is -1[.]0"),
    ],
)
def test_invalid_settings_of_a_cluster_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        ClusterConfig(**settings)
