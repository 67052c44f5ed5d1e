"""Counts of launches, copies and host synchronizations of the engine's steps."""

from __future__ import annotations

import pytest

from tests.simulated_cuda.own_process import passes

pytest.importorskip("triton")


def test_the_counts_of_a_step_are_within_their_limits() -> None:
    passes("tests/simulated_cuda/check_steps.py")
