"""Copies from host memory into the arena, concurrent with running steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from vlora.threads import background_executor


class Transfer(Protocol):
    """Copies adapters one at a time, in submission order."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Future[None]:
        """Copy `source` (host, uint8) to `target` (arena, same size).

        Neither may change before the future is done. Any step started after that reads the copy.
        """
        ...

    def close(self) -> None:
        """Reject further copies."""
        ...


def make_transfer(device: torch.device, executor: Executor | None = None) -> Transfer:
    """The `Transfer` for an arena on `device`. `executor` runs the copies; None creates a thread."""
    executor = executor or background_executor("vlora-copy", device=device)
    return RingTransfer(executor, SideStream(device)) if device.type == "cuda" else HostTransfer(executor)


class HostTransfer:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Future[None]:
        # numpy releases the GIL while copying, and a second thread does not speed it up.
        return self._executor.submit(np.copyto, target.numpy(), source.numpy())

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Inline(Executor):
    """Runs each task immediately in the caller's thread, for timing or testing single steps."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class RingTransfer:
    """Copies into an arena on a GPU: in pieces through a ring of pinned buffers, on a separate stream.

    Copies from pinned memory are asynchronous. A small ring is enough; pinning every registered adapter would withhold
    that memory from other processes on the machine.
    """

    def __init__(self, executor: Executor, stream: SideStream, slot_bytes: int = 8 * 2**20, num_slots: int = 2) -> None:
        self._executor = executor
        self._stream = stream
        self._slots = [stream.pinned(slot_bytes) for _ in range(num_slots)]

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Future[None]:
        return self._executor.submit(self._copy, source, target, self._stream.mark_caller())

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, started: Any) -> None:
        # Kernels queued earlier may still read the old content of these pages.
        self._stream.wait(started)
        left: list[Any] = [None] * len(self._slots)  # per slot: event of its last copy
        size = len(self._slots[0])
        for number, (piece, place) in enumerate(zip(source.split(size), target.split(size), strict=True)):
            turn = number % len(self._slots)
            if left[turn] is not None:
                left[turn].synchronize()
            slot = self._slots[turn][: len(piece)]
            np.copyto(slot.numpy(), piece.numpy())
            left[turn] = self._stream.copy(place, slot)
        self._stream.synchronize()


class SideStream:
    """A CUDA stream separate from the one that runs steps."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark_caller(self) -> torch.cuda.Event:
        """Record an event after all work that the caller has queued so far."""
        return torch.cuda.current_stream(self._stream.device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Make later work on this stream wait for the event."""
        self._stream.wait_event(mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Queue a copy; return an event of its end."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        self._stream.synchronize()

    def current(self) -> AbstractContextManager[None]:
        """Context in which the calling thread launches its work on this stream."""
        return torch.cuda.stream(self._stream)
