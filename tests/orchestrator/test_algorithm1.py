"""Algorithm 1 against a literal transcription from the paper, and each change on its own."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlora.errors import BadConfig
from vlora.orchestrator import POLICIES, Algorithm1, Candidate, Decision, PolicyState, make_policy
from vlora.types import Mode

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


adapters_only = st.lists(st.tuples(st.sampled_from(ADAPTERS), st.floats(0, 2)), min_size=1, max_size=24)
with_the_base = st.lists(st.tuples(st.sampled_from([None, *ADAPTERS]), st.floats(0, 2)), min_size=1, max_size=24)


@given(queue=adapters_only, max_batch_size=st.integers(1, 16), merged=st.sampled_from([None, *ADAPTERS]))
def test_decisions_equal_the_paper_where_no_change_applies(
    queue: list[tuple[str, float]], max_batch_size: int, merged: str | None
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
    queue=with_the_base,
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


def test_merges_at_low_load() -> None:
    assert decide(requests_of("a"), 32) == Decision(Mode.MERGED, "a", ("r0",))
    assert paper(requests_of("a"), 32).mode is Mode.UNMERGED, "without the change it does not merge"


def test_starving_requests_are_sorted_by_credit_and_cut_to_the_batch() -> None:
    ready = [Candidate(f"r{i}", "a", credit) for i, credit in enumerate((1.5, 3.0, 2.0, 2.5))]
    assert decide(ready, 2) == Decision(Mode.UNMERGED, None, ("r1", "r3"))
    assert len(paper(ready, 2).order) > 2, "without the change the batch overflows"


def test_a_tie_keeps_the_merged_adapter() -> None:
    ready = requests_of("a", "b", "a", "b", "a", "b")
    assert decide(ready, 4, merged="b") == Decision(Mode.MERGED, "b", ("r1", "r3", "r5"))
    assert decide(ready, 4, merged="a").merged_adapter == "a"
    assert decide(ready, 4, merged="c").merged_adapter == "a", "the earliest group wins if neither is merged"


def test_base_model_requests_form_a_group_merged_as_w0() -> None:
    assert decide(requests_of(None, None, "a")) == Decision(Mode.MERGED, None, ("r0", "r1"))
    tie = requests_of("a", None, "a", None)
    assert decide(tie, 2, merged=None).order == ("r1", "r3"), "a tie keeps W0"
    assert decide(tie, 2, merged="a").order == ("r0", "r2")


def test_an_adapter_below_the_fidelity_floor_is_never_merged() -> None:
    ready = requests_of("a", "a", "a", "b")
    assert decide(ready, mergeable=frozenset("b")) == Decision(Mode.UNMERGED, None, ("r0", "r1", "r2", "r3"))
    assert decide(ready, mergeable=frozenset("ab")).mode is Mode.MERGED


def test_policies_are_chosen_by_name() -> None:
    assert isinstance(make_policy("algorithm1"), Algorithm1)
    with pytest.raises(BadConfig, match="'fifo'") as caught:
        make_policy("fifo")
    assert all(name in str(caught.value) for name in POLICIES)
