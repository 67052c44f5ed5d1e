"""Decode steps as CUDA graphs, and the simulation of graphs."""

from __future__ import annotations

import pytest

from tests.simulated_cuda.own_process import passes

pytest.importorskip("triton")


@pytest.mark.gpu_sim
@pytest.mark.timeout(600)
def test_decode_steps_as_graphs() -> None:
    passes("tests/simulated_cuda/check_decode_graphs.py")
