"""Device time of a call, by replays of a CUDA graph: the host's launches, which take longer than small kernels, do not
count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Replays:
    """A call as a CUDA graph; `replays()` runs it once and returns the device's seconds.

    The first use runs the call twice: once to compile kernels and to prepare what a capture must not, once to capture
    it. The call must have the same effect on the same memory each time.

    Args:
        call: Launches work on the current stream of the current device.
        before: Launched on the stream before each replay, and not timed.
        parts: Number of equal parts of the call; the seconds are those of one.
    """

    def __init__(self, call: Callable[[], object], before: Callable[[], object] | None = None, parts: int = 1) -> None:
        self._call, self._before, self._parts = call, before, parts
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> float:
        graph = self._graph or self._captured()
        if self._before is not None:
            self._before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / self._parts

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._call()
        return self._graph
