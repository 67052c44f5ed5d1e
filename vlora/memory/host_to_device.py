"""Bytes on their way from host memory into the arena, beside the steps that run meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol

import numpy as np
import torch

from vlora.threads import background_executor


class Transfer(Protocol):
    """Copies one adapter after the other, in the order they were started."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Future[None]:
        """Copy `source` (host, uint8) to `target` (arena, as many bytes).

        Neither may change before the future is done; then any step started later reads the copy.
        """
        ...

    def close(self) -> None:
        """Start no more copies."""
        ...


def make_transfer(device: torch.device, executor: Executor | None = None) -> Transfer:
    """The way into an arena on `device`. executor: runs the copies; None makes a thread."""
    executor = executor or background_executor("vlora-copy")
    return RingTransfer(executor, SideStream(device)) if device.type == "cuda" else HostTransfer(executor)


class HostTransfer:
    """Into an arena in host memory."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Future[None]:
        # numpy copies without the interpreter's lock, and gains nothing from a second thread.
        return self._executor.submit(np.copyto, target.numpy(), source.numpy())

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class RingTransfer:
    """Into an arena on a GPU: piece by piece through a ring of pinned buffers, on a stream of its own.

    Pinned memory is what the GPU can fetch without the host waiting; a ring of it is enough, where pinning every
    registered adapter would take that memory from everybody else on the machine.
    """

    def __init__(self, executor: Executor, stream: Stream, slot_bytes: int = 8 * 2**20, num_slots: int = 2) -> None:
        self._executor = executor
        self._stream = stream
        self._slots = [stream.pinned(slot_bytes) for _ in range(num_slots)]

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Future[None]:
        return self._executor.submit(self._copy, source, target, self._stream.mark_caller())

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, started: Any) -> None:
        # Kernels that were queued before may still read what lay in these pages.
        self._stream.wait(started)
        left: list[Any] = [None] * len(self._slots)  # per slot: when its last piece has left it
        size = len(self._slots[0])
        for number, (piece, place) in enumerate(zip(source.split(size), target.split(size), strict=True)):
            turn = number % len(self._slots)
            if left[turn] is not None:
                left[turn].synchronize()
            slot = self._slots[turn][: len(piece)]
            np.copyto(slot.numpy(), piece.numpy())
            left[turn] = self._stream.copy(place, slot)
        self._stream.synchronize()


class Stream(Protocol):
    """What the ring asks of a GPU."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that copies are queued from."""
        ...

    def mark_caller(self) -> Any:
        """A point after all that the caller has queued so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Start nothing before that point."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue a copy; what is returned can be waited for with `synchronize()`."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        ...


class SideStream:
    """A CUDA stream beside the one that steps run on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark_caller(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._stream.device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def synchronize(self) -> None:
        self._stream.synchronize()


class Inline(Executor):
    """Runs what it is given at once, in the caller's thread: for whoever times or tests single steps."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
