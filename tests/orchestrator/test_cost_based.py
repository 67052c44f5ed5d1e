"""The cost-based policy on a machine with expensive lanes: small situations with a single optimal decision."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from vlora.orchestrator.cost_model import Costs
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.orchestrator.policies.cost_based import CostBased
from vlora.simulator.arrivals import Arrival
from vlora.simulator.machine import MEASURED, Machine, read_costs
from vlora.simulator.replica import ReplicaConfig
from vlora.simulator.workloads import Hottest, Video
from vlora.simulator.world import replay
from vlora.types import Batch, Mode, StepResult

COSTS = Costs(
    base_s=0.1, token_s=0.001, lane_s=0.0053, long_lane_s=0.0003, long_adapter_s=0.04, merge_s=0.25, short_lane=8
)
THETA_S = 2.0


def state(merged: str | None = None, costs: Costs = COSTS) -> PolicyState:
    return PolicyState(
        merged,
        mergeable=frozenset("abcd"),
        max_batch_size=32,
        theta_s=THETA_S,
        shadow_adapter=merged,
        max_step_tokens=512,
        costs=costs,
    )


def decoding(adapter: str, number: int, waited_s: float = 0.0) -> list[Candidate]:
    return [Candidate(f"{adapter}{i}", adapter, waited_s, 1, 200, waited_s=waited_s) for i in range(number)]


def chunk(adapter: str, waited_s: float = 0.0) -> Candidate:
    """A video chunk for a head: a prompt of three steps, of which its credit counts one."""
    return Candidate(f"chunk-{adapter}", adapter, waited_s + 0.8, 1536, head=True, waited_s=waited_s)


def decide(ready: list[Candidate], at: PolicyState) -> Decision:
    return CostBased().decide(ready, at)


READS = COSTS._replace(lane_s=0.0, adapter_s=0.01, short_lane=512)


@pytest.mark.parametrize(
    ("ready", "at", "mode", "merged"),
    [
        pytest.param([chunk("a"), chunk("b"), chunk("c")], state(), Mode.MERGED, "a", id="video chunks take turns"),
        pytest.param([chunk("b"), chunk("c")], state("a"), Mode.MERGED, "b", id="a is done, so b is next"),
        # Ten requests use the available adapter a: mixed mode saves ten lanes for two more, but a is still read.
        pytest.param(
            [*decoding("a", 10), *decoding("b", 1), *decoding("c", 1)],
            state("a", COSTS._replace(short_lane=512)),
            Mode.MIXED,
            "a",
            id="lanes are saved",
        ),
        pytest.param(
            [*decoding("a", 10), *decoding("b", 1), *decoding("c", 1)],
            state("a", READS),
            Mode.UNMERGED,
            None,
            id="an adapter is read once for all its requests",
        ),
        pytest.param(
            [chunk("a")],
            state("b", COSTS._replace(long_lane_s=0.0, long_adapter_s=0.1)),
            Mode.MERGED,
            "a",
            id="three reads for a long prompt cost more than a merge",
        ),
        # By credit, which includes the next step, the late prompt already starves; a token now costs two lanes.
        pytest.param([chunk("a"), chunk("b", THETA_S - 0.1)], state("a"), Mode.MERGED, "a", id="within the bound"),
        pytest.param([chunk("a"), chunk("b", THETA_S + 0.1)], state("a"), Mode.MIXED, "a", id="beyond the bound"),
    ],
)
def test_the_cheapest_mode(ready: list[Candidate], at: PolicyState, mode: Mode, merged: str | None) -> None:
    found = decide(ready, at)
    assert (found.mode, found.merged_adapter) == (mode, merged)
    if mode is not Mode.UNMERGED and len(ready) <= 3:
        starving = [each.request_id for each in ready if each.waited_s > THETA_S]
        assert found.order == (f"chunk-{merged}", *starving)


def test_a_batch_of_one_adapter_is_never_split() -> None:
    """Regardless of rounding, where merging overwrites W0: alternating plans for heads may hide the merge cost."""
    draws = random.Random(0)
    for _ in range(500):
        base_s, token_s, merge_s, back_s = (draws.uniform(1e-6, 0.5) for _ in range(4))
        costs = Costs(base_s=base_s, token_s=token_s / 100, lane_s=token_s / 10, merge_s=merge_s, back_s=back_s)
        ready = [Candidate(f"a{i}", "a", 0.0, draws.randint(2, 100), head=True) for i in range(draws.randint(1, 32))]
        assert decide(ready, state("a", costs)).merged_adapter == "a"


@pytest.mark.parametrize("oldest", ["a", "b"])
def test_the_merged_adapter_finishes_before_another_is_merged(oldest: str) -> None:
    """Merging b now and a again later costs one more merge, independent of arrival order."""
    ready = [chunk(oldest), chunk("ab".replace(oldest, "")), chunk("c")]
    at = state("a")
    for _ in range(20):
        chosen = decide(ready, at)
        assert chosen.merged_adapter == "a" and chosen.order == ("chunk-a",)
        at = at._replace(carried=chosen.carried)


def test_starving_prompts_run_by_wait_within_the_batch_size() -> None:
    late = [Candidate(f"r{i}", "b", THETA_S + i, 1536, head=True, waited_s=THETA_S + i) for i in range(1, 41)]
    chosen = decide([*decoding("a", 8), *late], state("a")).order
    assert set(chosen) == {f"r{i}" for i in range(9, 41)}, "the 32 requests with the longest waits"


def test_an_urgent_request_runs_at_once() -> None:
    urgent = chunk("b")._replace(urgent=True, credit=THETA_S + 1e-9)
    assert "chunk-b" in decide([*decoding("a", 8), urgent], state("a")).order


def test_a_prompt_does_not_delay_its_half() -> None:
    """Sixteen alternate with fifteen, and the merged half runs first although one of its requests has a prompt."""
    prompt, dear = Candidate("prompt", "a", 0.0, 256), COSTS._replace(base_s=0.05, short_lane=512)
    chosen = decide([*decoding("a", 16), prompt, *decoding("b", 15)], state("a", dear))
    assert (chosen.mode, chosen.merged_adapter) == (Mode.MERGED, "a")
    assert "prompt" in chosen.order and len(chosen.order) == 17


def test_decoding_requests_are_not_split() -> None:
    """Decoding requests need the next round too: two rounds instead of one gain nothing, even for half of them."""
    assert decide([*decoding("a", 3), *decoding("b", 3)], state("a")).mode is not Mode.MERGED


BOUNDED = ("cost_based", "algorithm1", "dlora", "unmerged_only")


@pytest.mark.parametrize("streams, load", [(4, 1.2), pytest.param(16, 1.2, marks=pytest.mark.slow)])
def test_video_latency_matches_the_best_bounded_policy(streams: int, load: float) -> None:
    costs, _ = read_costs(MEASURED)
    chunk_s = 3 * (costs.merged_s(512, 0) + costs.lanes_s(512))
    stretch = streams * chunk_s / load
    arrivals = [
        each._replace(time_s=each.time_s * stretch) for each in Video(streams=streams).arrivals(150, streams, seed=0)
    ]
    assert_ahead(arrivals, costs)


@pytest.mark.parametrize("skew, num_adapters", [(0.5, 2), pytest.param(0.2, 20, marks=pytest.mark.slow)])
def test_latency_in_overload_matches_the_best_bounded_policy(skew: float, num_adapters: int) -> None:
    costs, _ = read_costs(MEASURED)
    lengths = {"prompt_min": 64, "prompt_max": 128, "answer_min": 50, "answer_max": 100}
    assert_ahead(list(Hottest(rate=1.6, skew=skew, **lengths).arrivals(200, num_adapters, seed=0)), costs)


def test_only_the_first_batch_influences_the_plan() -> None:
    """A hundred further requests, beyond the batch, would favor a split plan."""
    first = [each for name in "abcd" for each in decoding(name, 8)]
    behind = [each._replace(request_id=f"behind-{i}") for i, each in enumerate(decoding("a", 100))]
    alone, crowd = decide(first, state("a")), decide([*first, *behind], state("a"))
    assert (alone.mode, alone.merged_adapter, alone.order) == (crowd.mode, crowd.merged_adapter, crowd.order)


def assert_ahead(arrivals: list[Arrival], costs: Costs) -> None:
    found = {
        policy: replay(arrivals, ReplicaConfig(costs=costs, policy=policy)).average_token_latency_s
        for policy in BOUNDED
    }
    assert found["cost_based"] <= 1.03 * min(found.values()), found


# -- machines that the cost model cannot fit --------------------------------------------------------------------------

Factor = Callable[[int, Batch, bool], float]
"""The factor of a step's time by its number, its contents, and whether weights were changed for it."""


@pytest.mark.parametrize(
    ("factor", "workload", "num_requests", "most"),
    [
        pytest.param(lambda n, batch, changed: 1.0, Hottest(rate=0.5, skew=0.95), 60, 0.88, id="as modelled"),
        pytest.param(
            lambda n, batch, changed: 1.0 if batch.merged_adapter is None else 1.25,
            Hottest(rate=0.5, skew=0.6),
            60,
            1.01,
            id="slow over merged weights",
        ),
        pytest.param(
            lambda n, batch, changed: 1.5 if batch.mode is Mode.MIXED else 1.0,
            Video(streams=4),
            100,
            1.01,
            id="slow in mixed mode",
        ),
        pytest.param(
            lambda n, batch, changed: 1.5 if changed else 1.0, Video(streams=4), 100, 1.03, id="slow after a change"
        ),
        pytest.param(
            lambda n, batch, changed: 3.0 if n < 40 and batch.mode is Mode.UNMERGED else 1.0,
            Hottest(rate=0.5, skew=0.3),
            100,
            1.01,
            id="slow unmerged steps at first",
        ),
    ],
)
def test_little_is_lost_against_unmerged_steps_where_predictions_are_wrong(
    factor: Factor, workload: Hottest | Video, num_requests: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Machine):
        num_steps = 0

        def run(self, batch: Batch) -> StepResult:
            result, self.num_steps = super().run(batch), self.num_steps + 1
            more_s = result.step_s * (factor(self.num_steps, batch, result.switched) - 1)
            self._clock.now += more_s
            return msgspec.structs.replace(result, step_s=result.step_s + more_s)

    monkeypatch.setattr("vlora.simulator.replica.Machine", Other)
    costs, load_s = read_costs(MEASURED)
    latency_s = {}
    for policy in ("cost_based", "unmerged_only"):
        config = ReplicaConfig(costs=costs, load_s=load_s, policy=policy)
        found = replay(workload.arrivals(num_requests, 8, seed=0), config).as_dict()
        latency_s[policy] = found["average_token_latency_ms"] or found["mean_latency_s"]
    assert latency_s["cost_based"] <= most * latency_s["unmerged_only"]
