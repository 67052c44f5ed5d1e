"""Algorithm 1 against a literal transcription from the paper, each change on its own, and camera loads in a replica."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.orchestrator.checked_replica import CheckedReplica, CheckedReplicaConfig
from tests.orchestrator.sample_requests import make_request
from vlora.errors import BadConfig
from vlora.orchestrator.cost_model import Costs
from vlora.orchestrator.policies.algorithm1 import Algorithm1
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.orchestrator.policies.registry import POLICIES, make_policy
from vlora.types import Batch, Mode

THETA_S = 1.0
ADAPTERS = ("a", "b", "c")


def paper(requests: list[Candidate], max_batch_size: int) -> Decision:
    """Algorithm 1 of the paper, line by line; trailing comments give its line numbers."""
    starve = [r for r in requests if r.credit > THETA_S]  # 4
    length = max_batch_size - len(starve)  # 5
    merge = max(([r for r in requests if r.adapter == lora] for lora in ADAPTERS), key=len)  # 6
    if len(starve) / max_batch_size <= 0.5 and len(merge) / max_batch_size > 0.5:  # 7
        lora = merge[0].adapter
        if len(starve) == 0:  # 8
            return Decision(Mode.MERGED, lora, ids(merge[:max_batch_size]))  # 9, 10
        return Decision(Mode.MIXED, lora, ids(starve + [r for r in merge if r not in starve][:length]))  # 12, 13
    return Decision(Mode.UNMERGED, None, ids(starve + [r for r in requests if r not in starve][:length]))  # 16, 17


def ids(candidates: list[Candidate]) -> tuple[str, ...]:
    return tuple(candidate.request_id for candidate in candidates)


def decide(
    ready: list[Candidate],
    max_batch_size: int = 8,
    *,
    merged: str | None = None,
    mergeable: frozenset[str] = frozenset(ADAPTERS),
) -> Decision:
    return Algorithm1().decide(ready, PolicyState(merged, mergeable, max_batch_size, THETA_S))


def requests_of(*adapters: str | None, credit: float = 0.5) -> list[Candidate]:
    return [Candidate(f"r{i}", adapter, credit) for i, adapter in enumerate(adapters)]


def queues(*adapters: str | None) -> st.SearchStrategy[list[tuple[str | None, float]]]:
    return st.lists(st.tuples(st.sampled_from(adapters), st.floats(0, 2)), min_size=1, max_size=24)


@given(queue=queues(*ADAPTERS), max_batch_size=st.integers(1, 16), merged=st.sampled_from([None, *ADAPTERS]))
def test_decisions_equal_the_paper_where_no_change_applies(
    queue: list[tuple[str | None, float]], max_batch_size: int, merged: str | None
) -> None:
    """Decisions match the paper where none of the changes applies.

    None applies when at least MaxBS requests wait, at most MaxBS starve, there is a single largest group, no request is
    for the base model, and every adapter may be merged. The paper does not define the order of starving requests; here
    they run in scheduling order.
    """
    requests = [Candidate(f"r{i}", adapter, credit) for i, (adapter, credit) in enumerate(queue)]
    starving = [r for r in requests if r.credit > THETA_S]
    sizes = sorted(sum(r.adapter == adapter for r in requests) for adapter in ADAPTERS)
    assume(len(requests) >= max_batch_size and len(starving) <= max_batch_size)
    assume(sizes[-1] > sizes[-2] or sizes[-1] / max_batch_size <= 0.5)
    ours, theirs = decide(requests, max_batch_size, merged=merged), paper(requests, max_batch_size)
    assert (ours.mode, ours.merged_adapter) == (theirs.mode, theirs.merged_adapter)
    assert ours.order == ids(starving) + theirs.order[len(starving) :]


@given(
    queue=queues(None, *ADAPTERS),
    max_batch_size=st.integers(1, 16),
    merged=st.sampled_from([None, *ADAPTERS]),
    mergeable=st.sets(st.sampled_from(ADAPTERS)),
)
def test_every_decision_is_feasible(
    queue: list[tuple[str | None, float]], max_batch_size: int, merged: str | None, mergeable: set[str]
) -> None:
    requests = [Candidate(f"r{i}", adapter, credit) for i, (adapter, credit) in enumerate(queue)]
    adapter_of = {r.request_id: r.adapter for r in requests}
    decision = decide(requests, max_batch_size, merged=merged, mergeable=frozenset(mergeable))
    assert len(set(decision.order)) == len(decision.order) <= max_batch_size
    assert decision.order, "at least one request must run"
    assert decision.merged_adapter is None or decision.merged_adapter in mergeable
    if decision.mode is Mode.MERGED:
        assert {adapter_of[request_id] for request_id in decision.order} == {decision.merged_adapter}
    if decision.mode is Mode.UNMERGED:
        assert decision.merged_adapter is None
        assert len(decision.order) == min(max_batch_size, len(requests)), "unmerged mode fills the batch"
    starving = sorted((r for r in requests if r.credit > THETA_S), key=lambda r: -r.credit)[:max_batch_size]
    scheduling_order = [r for r in requests if r in starving]
    assert decision.order[: len(starving)] == ids(scheduling_order), "starving requests run first"


def test_where_the_paper_waits_or_overflows() -> None:
    """A single request is merged at once; starving requests are sorted by credit and cut to the batch."""
    assert decide(requests_of("a"), 32) == Decision(Mode.MERGED, "a", ("r0",))
    assert paper(requests_of("a"), 32).mode is Mode.UNMERGED
    ready = [Candidate(f"r{i}", "a", credit) for i, credit in enumerate((1.5, 3.0, 2.0, 2.5))]
    assert decide(ready, 2) == Decision(Mode.UNMERGED, None, ("r1", "r3"))
    assert len(paper(ready, 2).order) > 2


@pytest.mark.parametrize(
    ("adapters", "most", "merged", "mergeable", "decided", "order"),
    [
        # A tie keeps the merged adapter; the earliest group wins if neither is merged.
        ("ababab", 4, "b", "abc", "b", "135"),
        ("ababab", 4, "a", "abc", "a", "024"),
        ("ababab", 4, "c", "abc", "a", "024"),
        # Requests of the base model form a group, which is merged as W0.
        ("--a", 8, None, "abc", "-", "01"),
        ("a-a-", 2, None, "abc", "-", "13"),
        ("a-a-", 2, "a", "abc", "a", "02"),
        # An adapter below the fidelity floor is never merged.
        ("aaab", 8, None, "b", None, "0123"),
        ("aaab", 8, None, "ab", "a", "012"),
    ],
)
def test_which_group_is_merged(
    adapters: str, most: int, merged: str | None, mergeable: str, decided: str | None, order: str
) -> None:
    ready = requests_of(*(None if adapter == "-" else adapter for adapter in adapters))
    found = decide(ready, most, merged=merged, mergeable=frozenset(mergeable))
    mode = Mode.UNMERGED if decided is None else Mode.MERGED
    assert found == Decision(mode, None if decided in (None, "-") else decided, tuple(f"r{i}" for i in order))


def test_policies_are_chosen_by_name() -> None:
    assert isinstance(make_policy("algorithm1"), Algorithm1)
    with pytest.raises(BadConfig, match="'fifo'") as caught:
        make_policy("fifo")
    assert all(name in str(caught.value) for name in POLICIES)


# -- camera loads in a replica: steps of 0.1 s, theta is half a second ------------------------------------------------

CAMERAS = ("traffic", "parking", "gate", "yard")


def cameras_box(*, max_batch_size: int = 8, room: int = 4) -> CheckedReplica:
    """`room`: adapters in memory."""
    config = CheckedReplicaConfig(
        num_pages=1024,
        max_adapter_pages=2 * room,
        max_batch_size=max_batch_size,
        max_step_tokens=256,
        theta_s=0.5,
        adapters=dict.fromkeys(CAMERAS, 2),
        costs=Costs(base_s=0.1, merge_s=0.02),
    )
    return CheckedReplica(config)


def ask(simulation: CheckedReplica, camera: str | None, number: int, *, first: int = 0, max_tokens: int = 100) -> None:
    names = (f"{camera or 'base'}{i}" for i in range(first, first + number))
    simulation.add(*(make_request(name, camera, max_tokens=max_tokens) for name in names))


def served(simulation: CheckedReplica) -> tuple[Batch, list[str | None]]:
    """The next step, and the adapters of its requests."""
    batch = simulation.step()
    assert batch is not None
    return batch, [item.adapter for item in batch.items]


@pytest.mark.parametrize("other", ["parking", None])
def test_one_starving_request_is_mixed_in(other: str | None) -> None:
    simulation = cameras_box()
    ask(simulation, "traffic", 6)
    ask(simulation, other, 1)
    steps = [served(simulation) for _ in range(7)]
    first = next(place for place, (batch, _) in enumerate(steps) if batch.mode is not Mode.MERGED)
    assert 1 <= first <= 5, "half a second covers at most five steps"
    assert steps[first][0].mode is Mode.MIXED and steps[first][0].merged_adapter == "traffic"
    assert steps[first][1] == [other, *["traffic"] * 6], "starving requests run first, others fill the batch"
    assert steps[first + 1][0].mode is Mode.MERGED, "it no longer starves after running"


def test_two_requests_finish_with_room_for_one_adapter_and_context() -> None:
    """A preempted request keeps its adapter until it yields a token; otherwise both preempt each other forever."""
    settings = {"max_adapter_pages": 2, "max_batch_size": 1, "max_step_tokens": 2, "theta_s": 0.001}
    simulation = CheckedReplica(CheckedReplicaConfig(num_pages=30, block_size=1, adapters={"t": 2, "g": 2}, **settings))  # type: ignore[arg-type]
    simulation.add(make_request("rg", "g", prompt=25, head="h"), make_request("rt", "t", prompt=25, max_tokens=1))
    simulation.run(max_steps=200)
    assert (simulation.end("rg"), simulation.end("rt")) == ("head", "length")


def test_a_day_of_camera_traffic() -> None:
    """Night: one camera. Morning: more traffic, sometimes a gate. Noon: all. Evening: traffic, then the base."""
    simulation = cameras_box()
    loads: list[dict[str | None, tuple[int, int]]] = [
        {"yard": (1, 4)},
        {"traffic": (6, 20), "gate": (1, 1)},
        dict.fromkeys(CAMERAS, (2, 6)),
        {"traffic": (3, 6)},
        {None: (2, 3)},
    ]
    for number, load in enumerate(loads):
        for camera, (count, max_tokens) in load.items():
            ask(simulation, camera, count, first=10 * number, max_tokens=max_tokens)
        simulation.run()
    merged, mixed, unmerged = Mode.MERGED, Mode.MIXED, Mode.UNMERGED
    assert [mode for mode, _ in itertools.groupby(line.batch.mode for line in simulation.log)] == [
        *(merged, mixed, merged, unmerged, merged)
    ]
    stats = simulation.stats
    assert stats.requests_by_mode == {"merged": 1 + 6 + 3 + 2, "mixed": 1 + 6, "unmerged": 8}
    assert stats.num_switches == 5, "to yard, to traffic, back to W0, to traffic, back to W0"
    assert stats.num_finished == 21
