"""A step's arrays and tokens on the (simulated) device: one copy there, tokens for the next step, and for the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated_cuda import CUDA, Kind, counting, simulated_cuda
from tests.simulated_cuda.counts import HOST_WAITS
from vlora.models.gpu.step_inputs import StepInputs, StepTokens


@pytest.fixture(autouse=True, scope="module")
def simulation() -> Iterator[None]:
    with simulated_cuda():
        yield


def arrays_of(seed: int) -> list[np.ndarray]:
    draws = np.random.default_rng(seed)
    return [
        draws.integers(0, 1000, 5),
        draws.integers(0, 9, (3, 7), dtype=np.int32),
        draws.random((5, 2)),
        draws.random(3) < 0.5,
        np.empty(0, dtype=np.int64),
    ]


def test_a_step_is_one_asynchronous_copy_and_no_wait() -> None:
    inputs = StepInputs(CUDA, StepTokens(CUDA))
    for step in range(5):
        with counting() as counts:
            tensors = [inputs.put(array) for array in arrays_of(step)]
            inputs.copy()
            inputs.copy()  # nothing was added
        assert counts.total(Kind.H2D_ASYNC) == 1 and counts.total(Kind.LAUNCH, *HOST_WAITS) == 0
        for tensor, array in zip(tensors, arrays_of(step), strict=True):
            assert tensor.device == CUDA
            np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)  # this waits for the step


def test_equal_sizes_have_equal_addresses() -> None:
    inputs = StepInputs(CUDA, StepTokens(CUDA))
    addresses = set()
    for step in range(4):
        addresses.add(tuple(inputs.put(array).data_ptr() for array in arrays_of(step)))
        inputs.copy()
        torch.cuda.synchronize()
    assert len(addresses) == 1


@given(st.lists(st.lists(st.integers(0, 40_000), max_size=4), min_size=1, max_size=5))
def test_arrays_of_any_size_arrive(steps: list[list[int]]) -> None:
    inputs = StepInputs(CUDA, StepTokens(CUDA))
    for number, sizes in enumerate(steps):
        arrays = [np.full(size, number + place) for place, size in enumerate(sizes)]
        tensors = [inputs.put(array) for array in arrays]
        inputs.copy()
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_the_host_waits_before_it_overwrites_a_pending_copy() -> None:
    """Steps that nothing waits for: the third one uses the first one's buffer again."""
    inputs = StepInputs(CUDA, StepTokens(CUDA))
    with counting() as counts:
        for step in range(4):
            inputs.put(np.full(8, step))
            inputs.copy()
    assert counts.total(Kind.SYNCHRONIZE) == 2
    torch.cuda.synchronize()


def test_without_the_wait_the_pending_copy_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: True)
    inputs = StepInputs(CUDA, StepTokens(CUDA))
    for step in range(3):
        inputs.put(np.full(8, step))
        inputs.copy()
    with pytest.raises(RuntimeError, match="asynchronous copy from it was pending"):
        torch.cuda.synchronize()


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_the_next_step_reads_tokens_without_a_wait() -> None:
    tokens = StepTokens(CUDA)
    drawn, ids = torch.tensor([70, 80, 90], device="cuda"), torch.tensor([5, -3, -1, 6, -2], device="cuda")
    with counting() as counts:
        on_host = tokens.keep(drawn)
        tokens.fill(ids)
    assert counts.total(*HOST_WAITS) == 0 and counts.total(Kind.D2H_ASYNC) == 1
    assert ids.tolist() == [5, 90, 70, 6, 80]
    assert on_host.tolist() == [70, 80, 90]


def test_tokens_with_reserved_room_stay_at_one_address() -> None:
    tokens = StepTokens(CUDA)
    tokens.reserve(1000)
    address = tokens.drawn.data_ptr()
    for number in (4, 1000):
        tokens.keep(torch.arange(number, device="cuda"))
    assert tokens.drawn.data_ptr() == address


def test_a_step_with_more_rows_than_any_before_gets_larger_buffers() -> None:
    tokens = StepTokens(CUDA)
    first = tokens.keep(torch.tensor([4], device="cuda"))
    many = tokens.keep(torch.arange(1000, device="cuda"))
    ids = torch.tensor([-1000], device="cuda")
    tokens.fill(ids)
    torch.cuda.synchronize()
    assert ids.tolist() == [999] and first.tolist() == [4] and many.tolist() == list(range(1000))
