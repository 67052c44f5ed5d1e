"""Stand-ins for `torch.cuda.CUDAGraph` and its functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.simulated_cuda import capture, streams
from tests.simulated_cuda.counts import Kind


class CUDAGraph:
    """A captured graph. operations: as they were captured."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: capture.Capture | None = None

    @property
    def operations(self) -> list[capture.Operation]:
        assert self._capture is not None, "nothing was captured"
        return self._capture.operations

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        if streams.current_stream() is streams.default_stream():
            raise capture.CaptureError("the default stream cannot be captured")
        self._capture = capture.begin(streams.current_stream(), capture_error_mode)

    def capture_end(self) -> None:
        capture.end()

    def replay(self) -> None:
        assert self._capture is not None, "nothing was captured"
        streams.count(Kind.LAUNCH, "graph")
        with torch._C._DisableTorchDispatch():
            self._capture.replay()


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
) -> Iterator[None]:
    """`torch.cuda.graph`."""
    streams.synchronize()
    with streams.use_stream(stream or streams.Stream(name="capture")):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def graph_pool_handle() -> tuple[int, int]:
    return 0, 1


def is_capturing() -> bool:
    return capture.current() is not None
