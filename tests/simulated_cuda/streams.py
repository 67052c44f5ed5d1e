"""Streams, events and pinned memory of the simulated device.

Every operation runs when the host issues it, so streams only name where it was issued. An asynchronous copy from or to
pinned memory stays pending until the host waits for an event or a stream after it. The source must not change before,
and the target does not have the values before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tests.simulated_cuda import capture
from tests.simulated_cuda.counts import SERVING, Kind, record


class Stream:
    """A stand-in for `torch.cuda.Stream`. issued: number of asynchronous copies issued to it so far."""

    def __init__(self, device: Any = None, priority: int = 0, name: str = "side", **_: Any) -> None:
        self.device = torch.device("cuda:0")
        self.name = name
        self.cuda_stream = 0 if name == SERVING else id(self)
        self.issued = 0

    def synchronize(self) -> None:
        count(Kind.SYNCHRONIZE, "stream")
        pinned.finish(self, self.issued)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Later work of this stream waits for the event, the host does not."""

    def wait_stream(self, stream: Stream) -> None:
        """Later work of this stream waits for the other stream, the host does not."""
        if (captured := capture.current()) is not None:
            captured.wait(self, stream)

    def query(self) -> bool:
        return not pinned.is_pending(self, self.issued)


class Event:
    """A stand-in for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._stream: Stream | None = None
        self._issued = 0
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._issued, self._time = self._stream.issued, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Later work of the stream waits for the event, the host does not."""

    def query(self) -> bool:
        """Whether the host has waited for the copies before the event; a GPU may be faster."""
        return self._stream is None or not pinned.is_pending(self._stream, self._issued)

    def synchronize(self) -> None:
        count(Kind.SYNCHRONIZE, "event")
        if self._stream is not None:
            pinned.finish(self._stream, self._issued)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._time - self._time)


_default = Stream(name=SERVING)
_thread = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_thread, "stream", _default)


def default_stream(device: Any = None) -> Stream:
    return _default


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    _thread.stream = stream or before
    try:
        yield
    finally:
        _thread.stream = before


def count(kind: Kind, name: str) -> None:
    """Count an operation on the calling thread's stream. Raises CaptureError if a capture does not permit it."""
    capture.check(kind, name, current_stream())
    if kind in (Kind.D2H, Kind.ITEM):
        pinned.finish(current_stream(), current_stream().issued)
    record(kind, name, current_stream().name)


def synchronize(device: Any = None) -> None:
    count(Kind.SYNCHRONIZE, "device")
    pinned.finish(None, 0)


class _Copy(NamedTuple):
    """An asynchronous copy: the `number`-th of its stream. writes: into host memory."""

    stream: Stream
    number: int
    on_host: torch.Tensor
    values: torch.Tensor
    writes: bool


class _Pinned:
    """Pinned host memory, and the copies from and to it that the host has not waited for."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []  # kept, so that no other tensor gets the same addresses
        self._pending: list[_Copy] = []
        self._lock = threading.Lock()

    def register(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._tensors.append(tensor)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        storages = (own.untyped_storage() for own in self._tensors)
        return any(own.data_ptr() <= address < own.data_ptr() + own.nbytes() for own in storages)

    def begin_upload(self, source: torch.Tensor) -> None:
        """The source must not change before the copy is complete."""
        self._begin(source, source.clone(), False)

    def begin_download(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """The target has other values until the copy is complete."""
        torch.ops.aten.fill_(target, -1)
        self._begin(target, values, True)

    def _begin(self, on_host: torch.Tensor, values: torch.Tensor, writes: bool) -> None:
        stream = current_stream()
        with self._lock:
            stream.issued += 1
            self._pending.append(_Copy(stream, stream.issued, on_host, values, writes))

    def is_pending(self, stream: Stream, issued: int) -> bool:
        with self._lock:
            return any(copy.stream is stream and copy.number <= issued for copy in self._pending)

    def finish(self, stream: Stream | None, issued: int) -> None:
        """Complete the copies up to a number on a stream, or all.

        Raises:
            RuntimeError: the source of a copy has changed since the copy was issued.
        """
        with self._lock:
            pending, self._pending = self._pending, []
            for copy in pending:
                if stream is not None and (copy.stream is not stream or copy.number > issued):
                    self._pending.append(copy)
                elif copy.writes:
                    torch.ops.aten.copy_(copy.on_host, copy.values)
                elif not torch.equal(copy.on_host, copy.values):
                    raise RuntimeError("pinned memory was written while an asynchronous copy from it was pending")


pinned = _Pinned()
