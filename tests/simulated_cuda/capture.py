"""The record of a CUDA graph of the simulated device: a stream's operations, which a replay computes again.

As on a GPU, operations have the addresses that their operands had during the capture, Python numbers keep their values,
and memory that is allocated during a capture has no values before the first replay. Operations that a driver
rejects during a capture raise an error here too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tests.simulated_cuda.counts import HOST_WAITS, Kind


class CaptureError(RuntimeError):
    """An operation that a CUDA graph cannot contain."""


class Operation(NamedTuple):
    """name: of the operator or kernel. arguments: numbers as they are, tensors by address, shape and strides.

    The address in memory that was allocated during the capture is the number of the allocation and the offset in it.
    """

    name: str
    arguments: tuple[Any, ...]


class Capture:
    """The operations of one thread on one stream, from the start of a capture to its end.

    others: whether operations of other threads that wait for the device are errors too (mode "global").
    """

    def __init__(self, stream: Any, *, others: bool) -> None:
        self.stream, self.others = stream, others
        self.thread = threading.get_ident()
        self.operations: list[Operation] = []
        self._again: list[Callable[[], object]] = []
        self._allocated: dict[int, int] = {}  # numbers by address of the storage
        self._results: list[torch.Tensor] = []
        self._branches: set[Any] = set()  # streams that have waited for the captured one
        self._unjoined: set[Any] = set()  # those of them for which it has not waited since their last work

    def wait(self, stream: Any, other: Any) -> None:
        """`stream` waits for `other`, which makes it a branch of the graph if `other` is part of it."""
        if other is self.stream or other in self._branches:
            if stream is not self.stream:
                self._branches.add(stream)
                self._unjoined.add(stream)
            self._unjoined.discard(other)

    def issue(self, name: str, stream: Any) -> None:
        """Raises CaptureError if the stream is not part of the graph."""
        if stream is self.stream:
            return
        if stream not in self._branches:
            raise CaptureError(f"{name} was issued to another stream than those that are captured")
        self._unjoined.add(stream)

    def allocate(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory of new tensors on the device, given by their host tensors."""
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if address and address not in self._allocated:
                self._allocated[address] = len(self._allocated)
                self._results.append(tensor)

    def record(self, name: str, arguments: Iterable[Any], again: Callable[[], object] | None) -> None:
        """Add an operation. again: computes it another time; None if another operation does."""
        self.operations.append(Operation(name, tuple(map(self._description, arguments))))
        if again is not None:
            self._again.append(again)

    def end(self) -> None:
        """A capture computes nothing: results become undefined. Raises CaptureError for a branch without an end."""
        for tensor in self._results:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        if self._unjoined:
            raise CaptureError("the captured stream has not waited for a branch")

    def replay(self) -> None:
        for again in self._again:
            again()

    def _description(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(self._description, value))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage().data_ptr()
        number = self._allocated.get(storage)
        place = value.data_ptr() if number is None else (number, value.data_ptr() - storage)
        return place, tuple(value.shape), value.stride(), value.dtype


_capture: Capture | None = None


def begin(stream: Any, mode: str) -> Capture:
    global _capture
    if _capture is not None:
        raise CaptureError("a capture is already underway")
    _capture = Capture(stream, others=mode == "global")
    return _capture


def end() -> None:
    global _capture
    capture, _capture = _capture, None
    assert capture is not None
    capture.end()


def current() -> Capture | None:
    """The capture of the calling thread."""
    return _capture if _capture is not None and _capture.thread == threading.get_ident() else None


def check(kind: Kind, name: str, stream: Any) -> None:
    """Raises CaptureError for an operation that the driver rejects during the capture that is underway, if any."""
    capture = _capture
    if capture is None:
        return
    own = capture.thread == threading.get_ident()
    if (own or capture.others) and kind in (*HOST_WAITS, Kind.H2D_ASYNC, Kind.D2H_ASYNC):
        raise CaptureError(f"{kind} ({name}) is not permitted during the capture of a CUDA graph")
    if own:
        capture.issue(name, stream)
