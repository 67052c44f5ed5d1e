"""Clocks for the time of a step: the host's, and that of a GPU's stream.

Launches on a GPU return before the device has computed anything. The host's time between two launches says nothing
about the time of the work, so marks are events on the stream that runs the steps.
"""

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
    """Events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of the work of a device."""
    return StreamClock() if device.type == "cuda" else HostClock()
