"""Steps that are launched before the last one is collected, on the simulated device."""

from __future__ import annotations

import pytest

from tests.simulated_cuda.own_process import passes

pytest.importorskip("triton")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_steps_ahead_give_the_answers_of_single_requests() -> None:
    passes("tests/simulated_cuda/check_overlap.py", "-m", "not slow")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_steps_ahead_in_many_schedules() -> None:
    passes("tests/simulated_cuda/check_overlap.py", "-m", "slow")
