"""The tokens of a step on the simulated device: read by the next step there, and by the host later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulated_cuda import Kind, counting, simulated_cuda
from tests.simulated_cuda.counts import HOST_WAITS
from vlora.models.gpu.step_tokens import StepTokens


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with simulated_cuda():
        yield


def test_the_next_step_reads_tokens_without_a_wait() -> None:
    tokens = StepTokens(torch.device("cuda:0"))
    drawn, ids = torch.tensor([70, 80, 90], device="cuda"), torch.tensor([5, -3, -1, 6, -2], device="cuda")
    with counting() as counts:
        on_host = tokens.keep(drawn)
        tokens.fill(ids)
    assert counts.total(*HOST_WAITS) == 0 and counts.total(Kind.D2H_ASYNC) == 1
    assert ids.tolist() == [5, 90, 70, 6, 80]
    assert on_host.tolist() == [70, 80, 90]


def test_two_steps_have_their_own_copies_on_the_host() -> None:
    tokens = StepTokens(torch.device("cuda:0"))
    first, second = (tokens.keep(torch.tensor(values, device="cuda")) for values in ([1, 2], [3]))
    torch.cuda.synchronize()
    assert first.tolist() == [1, 2] and second.tolist() == [3]


def test_tokens_with_reserved_room_stay_at_one_address() -> None:
    tokens = StepTokens(torch.device("cuda:0"))
    tokens.reserve(1000)
    address = tokens.drawn.data_ptr()
    for number in (4, 1000):
        tokens.keep(torch.arange(number, device="cuda"))
    assert tokens.drawn.data_ptr() == address


def test_a_step_with_more_rows_than_any_before_gets_larger_buffers() -> None:
    tokens = StepTokens(torch.device("cuda:0"))
    first = tokens.keep(torch.tensor([4], device="cuda"))
    many = tokens.keep(torch.arange(1000, device="cuda"))
    ids = torch.tensor([-1000], device="cuda")
    tokens.fill(ids)
    torch.cuda.synchronize()
    assert ids.tolist() == [999] and first.tolist() == [4] and many.tolist() == list(range(1000))
