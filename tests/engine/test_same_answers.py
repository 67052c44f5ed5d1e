"""The main law: in every mode, each request gets the answer of plain transformers + PEFT on the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.families import FAMILIES
from tests.harness import FixedModes, run_engine
from tests.references import NUM_TOKENS, CaseReference, assert_same
from vlora.types import Mode

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, case_references: Callable[[str], CaseReference]) -> CaseReference:
    return case_references(request.param)


def test_unmerged_batch_of_all_ranks(reference: CaseReference) -> None:
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS)
    # A step with only base-model requests, with images encoded before, needs no delta: it counts as merged.
    assert Mode.UNMERGED in run.modes and Mode.MIXED not in run.modes
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("merged", ["wide8", "everywhere64", "patterned16", "narrow4"])
def test_mixed_batch_over_one_merged_adapter(reference: CaseReference, merged: str) -> None:
    # All images first: otherwise requests may start one after the other, and no step has several adapters.
    run = run_engine(reference, FixedModes(Mode.MIXED, merged), NUM_TOKENS, encode_share=1e9)
    assert Mode.MIXED in run.modes
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("merged", ["wide8", "everywhere64", None])
def test_merged_batch_of_one_adapter(reference: CaseReference, merged: str | None) -> None:
    own = [i for i, (adapter, _) in enumerate(reference.cases) if adapter == merged]
    run = run_engine(reference, FixedModes(Mode.MERGED, merged), NUM_TOKENS, only=own)
    assert run.modes == {Mode.MERGED}
    for got, case in zip(run.answers, own, strict=True):
        assert_same(got, reference.answers[case])


def test_modes_change_in_the_middle_of_requests(reference: CaseReference) -> None:
    # The merged adapter (or none) changes every few steps: chunks of one prompt and tokens of one answer run in every
    # mode.
    plan = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere64"), (Mode.MIXED, "patterned16")]
    run = run_engine(reference, FixedModes(*plan[0], plan=plan), NUM_TOKENS, max_step_tokens=24)
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED}
    assert run.num_switches > 10
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.slow
def test_prompts_run_in_chunks(reference: CaseReference) -> None:
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, max_step_tokens=11)
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.usefixtures("no_kv_admission")
def test_preempted_requests_continue_their_answers(reference: CaseReference) -> None:
    policy = FixedModes(Mode.MIXED, "wide8")
    # All images first: requests that start one after the other never fill the memory together.
    run = run_engine(reference, policy, NUM_TOKENS, scarce_memory=True, encode_share=1e9)
    assert run.num_preemptions > 0
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, FixedModes(Mode.MIXED, "wide8-1")], ids=["paper", "mixed"])
def test_adapters_are_loaded_and_evicted_in_a_tiny_arena(reference: CaseReference, policy: FixedModes | None) -> None:
    """Every adapter under two names; the largest do not fit at the same time. Threads read and load them."""
    twice = copy.copy(reference)
    twice.adapters = {f"{name}-{i}": path for i in (0, 1) for name, path in reference.adapters.items()}
    cases = [(name and f"{name}-{i}", prompt) for i in (0, 1) for name, prompt in reference.cases]
    run = run_engine(twice, policy, NUM_TOKENS, cases=cases, scarce_memory=True, background=True)
    assert run.num_loads >= len(twice.adapters) > run.num_resident
    for got, want in zip(run.answers, 2 * reference.answers, strict=True):
        assert_same(got, want)


def test_algorithm_1_end_to_end(reference: CaseReference) -> None:
    run = run_engine(reference, None, NUM_TOKENS)
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


def test_video(reference: CaseReference) -> None:
    if reference.video_case is None:
        pytest.skip(f"{reference.family} takes no video")
    assert reference.video_answer is not None
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, cases=[reference.video_case])
    assert_same(run.answers[0], reference.video_answer)
