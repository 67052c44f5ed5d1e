"""In-place unmerging has a cost: the scheduler learns it, and the cost-based policy includes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlora.errors import BadConfig
from vlora.orchestrator import Costs, TokenThresholds
from vlora.orchestrator.policies.base import Candidate, PolicyState
from vlora.orchestrator.policies.cost_based import CostBased
from vlora.simulator.arrivals import Arrival
from vlora.simulator.machine import read_costs
from vlora.simulator.replica import Replica, ReplicaConfig
from vlora.simulator.workloads import make_workload
from vlora.simulator.world import replay
from vlora.types import Mode

SHADOW = Costs(base_s=0.1, token_s=0.001, lane_s=0.0045, long_lane_s=0.0005, merge_s=0.2, short_lane=8)
IN_PLACE = SHADOW._replace(back_s=0.15)


def costs_file(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps({"costs": values}))
    return path


def answered(replica: Replica, number: int, adapter: str | None) -> None:
    replica.add(f"r{number}", Arrival(replica.clock.now, adapter, 4, 2))
    replica.run_until(replica.clock.now + 100)


@pytest.mark.parametrize(
    ("costs", "spent_s"), [(SHADOW, 0.2), (IN_PLACE, 0.2 + 0.15 + 0.2)], ids=["shadow", "in place"]
)
def test_switching_to_the_base_model_and_back_is_counted_and_learned(costs: Costs, spent_s: float) -> None:
    replica = Replica(ReplicaConfig(costs=costs, policy="merged_only"))
    for number, adapter in enumerate(("a", None, "a")):
        answered(replica, number, adapter)
    stats = replica.stats()
    assert stats.num_switches == 3
    assert stats.switch_s == pytest.approx(spent_s)
    learned = replica.scheduler.costs
    assert learned.merge_s == pytest.approx(0.2), "the cost of unmerging is not averaged into that of merging"
    assert learned.back_s == pytest.approx(costs.back_s)
    assert replica.scheduler.merged.shadow == (None if costs.back_s else "a")


def test_from_one_adapter_to_another_is_one_switch() -> None:
    replica = Replica(ReplicaConfig(costs=IN_PLACE, policy="merged_only"))
    for number, adapter in enumerate(("a", "b", "a")):
        answered(replica, number, adapter)
    assert replica.stats().switch_s == pytest.approx(3 * 0.2)
    assert replica.scheduler.costs.back_s == 0


def decide(costs: Costs, merged: str | None, ready: list[Candidate]) -> tuple[Mode, str | None]:
    shadow = None if costs.back_s else merged
    state = PolicyState(merged, frozenset("ab"), 16, theta_s=10.0, shadow_adapter=shadow, costs=costs)
    decision = CostBased().decide(ready, state)
    return decision.mode, decision.merged_adapter


def test_merged_weights_are_left_only_if_it_saves_more_than_the_return() -> None:
    ready = [Candidate(f"r{i}", None, 0.0) for i in range(2)]
    assert decide(SHADOW, "a", ready) == (Mode.UNMERGED, None)
    assert decide(IN_PLACE, "a", ready) == (Mode.UNMERGED, None), "no request needs the merged weights"
    ready += [Candidate("own", "a", 0.0)]
    assert decide(SHADOW, "a", ready) == (Mode.UNMERGED, None), "one lane instead of two, at no cost"
    assert decide(IN_PLACE, "a", ready) == (Mode.MIXED, "a"), "150 ms to save 4.5 ms"


def test_halves_alternate_only_where_switching_is_free() -> None:
    # Two long prompts of different adapters: either no lanes, one after the other, or two lanes for half of the tokens,
    # together.
    shadow, in_place = (costs._replace(base_s=0.01, lane_s=0.002) for costs in (SHADOW, IN_PLACE))
    ready = [Candidate("x", "a", 0.0, 150), Candidate("y", "b", 0.0, 100)]
    assert decide(shadow, "a", ready) == (Mode.MERGED, "a")
    assert decide(in_place._replace(back_s=5.0, merge_s=5.0), "a", ready) == (Mode.MIXED, "a")


def test_the_cost_policy_switches_less_in_place() -> None:
    workload = make_workload("hottest:rate=0.7,skew=0.6").arrivals(120, 20, 0)
    measures = {
        costs: replay(workload, ReplicaConfig(costs=costs, policy="cost_based")).as_dict()
        for costs in (SHADOW, IN_PLACE)
    }
    assert measures[IN_PLACE]["switches"] < measures[SHADOW]["switches"]


@pytest.mark.parametrize("field", TokenThresholds._fields)
@pytest.mark.parametrize("threshold", [-1, 2.5, True, "8", None])
def test_an_invalid_threshold_is_refused(threshold: object, field: str, tmp_path: Path) -> None:
    values = {**SHADOW._asdict(), "load_s": 0.1, field: threshold}
    with pytest.raises(BadConfig, match=rf"{field} is .* a whole number of tokens"):
        read_costs(costs_file(tmp_path, values))


def test_a_file_without_short_lane_is_refused(tmp_path: Path) -> None:
    values = {**SHADOW._asdict(), "load_s": 0.1}
    del values["short_lane"]
    with pytest.raises(BadConfig, match=r"short_lane is .* a whole number of tokens"):
        read_costs(costs_file(tmp_path, values))


def test_cost_files_of_earlier_versions_can_be_read(tmp_path: Path) -> None:
    values = {**SHADOW._asdict(), "load_s": 0.1}
    for field in ("back_s", "patch_s", "thin_token_s", "hidden_tokens", "thin_tokens"):
        del values[field]
    assert read_costs(costs_file(tmp_path, values)) == (SHADOW, 0.1)
