"""A second stream of a device, for kernels that run beside those of the caller."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """Kernels that start after the caller's work so far and end before its work after `join`.

    In the capture of a CUDA graph they become a branch of the graph. On a CPU everything runs in order.
    """

    __slots__ = ("_device", "_open")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Context in which kernels are launched on the branch. Memory that they use must be kept until `join`."""
        if self._device.type != "cuda":
            yield
            return
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._open = True
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Make later work of the current stream wait for the branch."""
        if self._open:
            torch.cuda.current_stream(self._device).wait_stream(_stream(self._device))
            self._open = False


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of all branches of a device: they are used one after the other."""
    return torch.cuda.Stream(device)
