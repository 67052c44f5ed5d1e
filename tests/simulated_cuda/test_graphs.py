"""The simulated CUDA graphs: replays read the addresses of the capture, and a capture fails where a driver's does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.simulated_cuda import Kind, counting, simulated_cuda
from tests.simulated_cuda.capture import CaptureError


@pytest.fixture(autouse=True)
def simulation() -> Iterator[None]:
    with simulated_cuda():
        yield


def captured(call: Callable[[], object], mode: str = "thread_local") -> Any:
    """A graph of a call, with the stand-in's `operations`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
        call()
    return graph


def test_a_replay_computes_from_the_current_content_of_buffers() -> None:
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = captured(lambda: y.copy_((2 * x + 1)[:2].sum() + y))
    x.fill_(5)
    y.zero_()
    with counting() as counts:
        graph.replay()
    assert counts.total(Kind.LAUNCH) == 1 and y.tolist() == [22, 22, 22]
    graph.replay()
    assert y.tolist() == [44, 44, 44]


def test_memory_of_a_capture_has_no_values_before_a_replay() -> None:
    x = torch.ones(3, device="cuda")
    made: list[torch.Tensor] = []
    graph = captured(lambda: made.append(x + 1))
    assert made[0].isnan().all().tolist()
    graph.replay()
    assert made[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.tolist(),
        lambda x: float(x[0]),
        lambda x: torch.tensor([1.0]).to(x.device),
        lambda x: x.copy_(torch.zeros(3, pin_memory=True), non_blocking=True),
        lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
        lambda x: x[x > 0],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
    ],
)
def test_waits_and_copies_of_the_host_end_a_capture(call: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(CaptureError):
        captured(lambda: call(x))
    captured(lambda: x + 1).replay()  # the next capture is not affected


def test_a_capture_needs_a_stream_of_its_own() -> None:
    with pytest.raises(CaptureError, match="default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    x = torch.ones(3, device="cuda")
    other = torch.cuda.Stream()

    def elsewhere() -> None:
        with torch.cuda.stream(other):
            x.add_(1)

    with pytest.raises(CaptureError, match="another stream"):
        captured(elsewhere)


@pytest.mark.parametrize(("mode", "fails"), [("thread_local", False), ("global", True)])
def test_other_threads_may_wait_during_a_capture_of_one_thread(mode: str, fails: bool) -> None:
    x = torch.ones(3, device="cuda")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            x.tolist()
        except CaptureError as error:
            errors.append(error)

    def call() -> None:
        x.add(1)
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    captured(call, mode)
    assert bool(errors) == fails
