"""The clock of a step's work."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points of a step's work, and gives the times between them."""

    def mark(self) -> Any:
        """A mark after all work that was issued so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Wait until the work before a mark is done."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks, after `wait` for the second one."""
        ...


class HostClock:
    """The host's clock, for devices that compute in the call itself."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class StreamClock:
    """A GPU's clock, by events on its stream: a launch returns before the device has computed anything."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3
