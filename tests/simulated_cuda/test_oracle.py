"""Processes on the simulated device: the engine's oracle tests with threads, decode graphs, and steps ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import FAMILIES

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]

ENGINE = "tests/engine"
ANSWERS = f"{ENGINE}/test_answers.py"
LORA = f"{ANSWERS}::test_lora"
FAST = "qwen2_vl"  # its fast tests run apart from the others
LEFT = f"{FAST} and (chunks or evicted)"
QWEN = " or ".join([LEFT, *(family for family in FAMILIES if "qwen" in family and family != FAST)])


def passes(*arguments: str) -> None:
    """Run pytest on the simulated device in a process of its own; fails with its output unless all tests pass.

    Triton's interpreter is selected for a whole process when the kernels are imported.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--device", "simulated-cuda"]
    # One thread: several processes with a pool of threads each disturb each other.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


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
def test_integers_rounded_at_load_and_stored_by_groups() -> None:
    files = f"{ENGINE}/test_quantized_answers.py", "tests/models/test_stored_groups.py"
    passes(*files, "-k", "bfloat16_on_the_device and (int4-qwen2_5_vl or int8-llava) or answers_are_those and gptq4")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_own_layers_and_compositions_in_every_mode() -> None:
    """No decode graph serves a merged adapter that has an output head of its own."""
    passes(f"{ANSWERS}::test_other_forms", "-k", "(own_layers or composed) and qwen2_5_vl and (merged or mixed)")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ("decode", "prompt"))
def test_steps_as_graphs(kind: str) -> None:
    passes(f"tests/simulated_cuda/check_{kind}_graphs.py")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedules", ("not slow", "slow"))
def test_steps_ahead_give_the_answers_of_single_requests(schedules: str) -> None:
    passes("tests/simulated_cuda/check_overlap.py", "-m", schedules)
