"""The engine's oracle tests on the simulated device, with threads: every mismatch of devices fails them.

They run in a process of their own: Triton's interpreter is selected for a whole process when the kernels are imported.
"""

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


def passes(*arguments: str) -> str:
    """Run pytest on the simulated device. Returns its output; fails with it unless all tests pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--device", "simulated-cuda"]
    # One thread: several processes with a pool of threads each disturb each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_XDIST")]:
        del environment[name]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout


def test_one_family_gives_the_reference_answers() -> None:
    passes(f"{ENGINE}/test_same_answers.py", "-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_reference_answers_in_every_mode(family: str) -> None:
    """Unmerged, merged and mixed, mode switches, chunked prompts, preemption, adapters loaded by threads, video."""
    others = " and ".join(f"not {other}" for other in FAMILIES if other != family and family in other)
    passes(f"{ENGINE}/test_same_answers.py", "-k", f"{family} and {others}" if others else family)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "module", ["test_heads", "test_relocation", "test_in_place_answers", "test_swap", "test_reuse"]
)
def test_other_oracle_tests(module: str) -> None:
    passes(f"{ENGINE}/{module}.py", "-k", "not llava and not qwen3")


@pytest.mark.slow
def test_disabled_parts_of_the_engine_are_found() -> None:
    passes(f"{ENGINE}/test_negative_controls.py")
