"""The Triton kernels: in the interpreter on any machine, and compiled ahead for GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("checks", ("check_tiled.py", "check_styles.py"))
def test_kernels_agree_with_the_reference_in_the_interpreter(checks: str) -> None:
    # The interpreter is chosen when the kernels are imported, for a whole process.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/atmm/interpreted/{checks}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("capability", (80, 90))
def test_kernels_compile_ahead_without_spilling(capability: int) -> None:
    from atmm.tiled.lint import inspect, sample

    for kernel in sample():
        facts = inspect(kernel, capability)
        assert not facts.faults, (kernel, facts)
