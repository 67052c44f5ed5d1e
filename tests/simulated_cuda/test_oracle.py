"""Processes on the simulated device: the engine's oracle tests with threads, decode graphs, and steps ahead."""

from __future__ import annotations

import pytest

from tests.families import FAMILIES
from tests.simulated_cuda.own_process import passes

pytest.importorskip("triton")

ENGINE = "tests/engine"
ANSWERS = f"{ENGINE}/test_answers.py"
LORA = f"{ANSWERS}::test_lora"
FAST = "qwen2_vl"  # its fast tests run apart from the others
LEFT = f"{FAST} and (chunks or evicted)"
QWEN = " or ".join([LEFT, *(family for family in FAMILIES if "qwen" in family and family != FAST)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modes_that_change_give_the_reference_answers() -> None:
    """What `make test` runs on the simulated device: every mode of one family."""
    passes(f"{LORA}[lora-modes_change:shadow-{FAST}]")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_one_family_gives_the_reference_answers_within_the_limits_of_a_step() -> None:
    """Qwen2-VL in every mode, and the counts of launches, copies and synchronizations."""
    passes(LORA, "tests/simulated_cuda/check_steps.py", "-m", "not slow")


# Families share a process, and modules share one: to start one takes as long as a third of a family's tests.
@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("families", ("llava", QWEN), ids=("llava", "qwen"))
def test_every_family_gives_the_reference_answers_in_every_mode(families: str) -> None:
    """Unmerged, merged and mixed, mode switches, chunked prompts, preemption, adapters loaded by threads, video.

    Of the tests that differ only by the merged adapter or the policy, one runs.
    """
    alike = ["patterned16", "narrow4", "everywhere64", "paper", "rewriting"]
    passes(LORA, "-k", f"({families}) and not ({' or '.join(alike)})")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_two_ranks_give_the_reference_answers_in_every_mode() -> None:
    """A process and a device per rank; adapters replicated, split by rank and block-diagonal; a head."""
    passes("tests/parallel/test_same_answers.py", "-k", "qwen2_vl-2 and not packed")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_other_oracle_tests_and_their_negative_controls() -> None:
    files = [f"{ENGINE}/test_{module}.py" for module in ("heads", "switching", "swap")]
    # Every negative control, and the others on one family.
    passes(
        *files, f"{ANSWERS}::test_without_a_part_answers_are_wrong", "-k", "wrong or qwen2_5_vl or not (qwen or llava)"
    )


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_own_layers_and_compositions_in_every_mode() -> None:
    """No decode graph serves a merged adapter that has an output head of its own."""
    passes(f"{ANSWERS}::test_other_forms", "-k", "(own_layers or composed) and qwen2_5_vl and (merged or mixed)")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_decode_steps_as_graphs() -> None:
    passes("tests/simulated_cuda/check_decode_graphs.py")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedules", ("not slow", "slow"))
def test_steps_ahead_give_the_answers_of_single_requests(schedules: str) -> None:
    passes("tests/simulated_cuda/check_overlap.py", "-m", schedules)
