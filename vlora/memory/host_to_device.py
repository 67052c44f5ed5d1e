"""Copies from host memory into the arena, concurrent with running steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol

import numpy as np
import torch

from vlora.memory.ring_transfer import RingTransfer, SideStream
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
