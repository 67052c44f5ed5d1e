"""When a prompt is computed a few tokens at a time, so that those who decode beside it have narrow steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.orchestrator.simulation import Machine, Simulation, make_request
from vlora.orchestrator import Candidate, Costs, Decision, PolicyState
from vlora.orchestrator.cost import NARROW
from vlora.orchestrator.narrow_steps import token_limit
from vlora.simulator import MEASURED, Box, read_costs, replay
from vlora.simulator.workloads import Hottest
from vlora.types import Mode

COSTS = Costs(base_s=0.07, token_s=0.002, lane_s=0.0017, wide_lane_s=0.0002, adapter_s=0.003, wide_adapter_s=0.015)


def decoding(number: int, num_adapters: int = 8) -> list[Candidate]:
    return [Candidate(f"r{i}", f"a{i % num_adapters}", 0.0, 1, 50) for i in range(number)]


def prompt(num_tokens: int, adapter: str = "a0") -> Candidate:
    return Candidate(f"prompt-{adapter}", adapter, 0.0, num_tokens)


def test_a_short_prompt_beside_many_adapters_that_decode_keeps_steps_narrow() -> None:
    assert token_limit([*decoding(20), prompt(20)], None, COSTS) == NARROW
    mixed = [*decoding(8), *(each._replace(adapter="m") for each in decoding(12)), prompt(20, "m")]
    assert token_limit(mixed, "m", COSTS) == NARROW


def test_a_long_prompt_is_worth_a_wide_step() -> None:
    assert token_limit([*decoding(20), prompt(256)], None, COSTS) is None


def test_one_adapter_is_too_few_to_put_a_prompt_off() -> None:
    assert token_limit([*decoding(4, 1), prompt(40)], None, COSTS) is None


@pytest.mark.parametrize(
    "chosen, merged",
    [
        ([*decoding(20), prompt(12)], None),  # narrow as it is
        ([*decoding(20, 1), prompt(20)], "a0"),  # merged: nobody has a lane
        ([prompt(20), prompt(20, "a1")], None),  # nobody decodes
        (decoding(20), None),
        ([*decoding(31), prompt(20), prompt(20, "a1")], None),  # more requests than a narrow step has tokens
    ],
)
def test_nothing_to_gain(chosen: list[Candidate], merged: str | None) -> None:
    assert token_limit(chosen, merged, COSTS) is None


def test_where_wide_steps_are_no_dearer_prompts_are_not_cut() -> None:
    costs = COSTS._replace(wide_lane_s=COSTS.lane_s, wide_adapter_s=COSTS.adapter_s)
    assert token_limit([*decoding(20), prompt(20)], None, costs) is None


class Cut:
    """All who are ready, in steps of at most eight tokens."""

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        order = tuple(c.request_id for c in ready[: state.max_batch_size])
        return Decision(Mode.UNMERGED, None, order, max_tokens=8)


def test_the_scheduler_cuts_prompts_to_it_and_everybody_who_decodes_goes_on() -> None:
    machine = Machine(
        num_pages=200,
        max_adapter_pages=20,
        max_batch_size=8,
        max_step_tokens=64,
        theta_s=10.0,
        adapters=dict.fromkeys("abcde", 2),
        block_size=4,
    )
    simulation = Simulation(machine, policy=Cut())
    first = [(0.0, make_request(f"r{i}", name, prompt=1, max_tokens=30)) for i, name in enumerate("abcde")]
    simulation.run([*first, (0.05, make_request("late", "a", prompt=40, max_tokens=1))])
    assert max(step.batch.num_tokens for step in simulation.log) == 8
    steps = [[item.request_id for item in step.batch.items] for step in simulation.log]
    cut = [names for names in steps if "late" in names]
    assert len(cut) > 5, "a prompt of forty tokens beside others"
    last = {name: max(place for place, names in enumerate(steps) if name in names) for name in steps[0]}
    assert all(name in names for place, names in enumerate(steps) for name in steps[0] if place <= last[name])


@pytest.mark.parametrize(("dearer", "most"), ((1.0, 1.0), (2.0, 0.92)))
def test_short_prompts_beside_decoding_are_answered_sooner_than_in_wide_steps(dearer: float, most: float) -> None:
    """On the measured machine, and on one where wide steps read adapters at twice the price."""
    measured, load_s = read_costs(MEASURED)
    costs = measured._replace(wide_adapter_s=dearer * measured.wide_adapter_s)
    lengths = {"prompt_min": 15, "prompt_max": 25, "answer_min": 12, "answer_max": 20}
    arrivals = list(Hottest(rate=4.9, skew=0.6, **lengths).arrivals(150, 8, seed=0))
    found = {
        policy: replay(arrivals, Box(costs=costs, load_s=load_s, policy=policy)).average_token_latency_s
        for policy in ("vlora_cost", "unmerged_only", "vlora")
    }
    assert found["vlora_cost"] < most * min(found["unmerged_only"], found["vlora"]), found
