"""The clock of a step's work."""

from __future__ import annotations

import time
from typing import Any, Protocol


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
