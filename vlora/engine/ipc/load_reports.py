"""Reports of an engine's load to a client that watches it. Adapters are sent as changes: there may be thousands."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from vlora.engine.ipc.messages import LoadReport
from vlora.engine.snapshot import EngineLoad


class LoadReporter:
    """The engine's side. Not used unless a client sends WatchLoad."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        send: Callable[[LoadReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Report nothing yet."""
        self._load = load
        self._send = send
        self._clock = clock
        self._every_s: float | None = None
        self._due_s = 0.0
        self._postponed = False  # the load may have changed before a report was due
        self._sent: EngineLoad | None = None
        self._num_taken = 0

    def count_request(self) -> None:
        self._num_taken += 1

    def watch(self, every_s: float) -> None:
        """Send a complete report with the next `poll`, and then at most one in `every_s` seconds."""
        self._every_s, self._due_s, self._sent, self._num_taken = every_s, 0.0, None, 0

    def poll(self) -> None:
        """Send a report if one is due and the load has changed. Called between two steps."""
        if self._every_s is None:
            return
        now = self._clock()
        self._postponed = now < self._due_s
        if self._postponed:
            return
        load, before = self._load(), self._sent
        if load == before:
            return
        self._due_s, self._sent = now + self._every_s, load
        known = {} if before is None else before.resident
        changed = {name: version for name, version in load.resident.items() if known.get(name) != version}
        self._send(
            LoadReport(
                load=msgspec.structs.replace(load, resident=changed),
                num_taken=self._num_taken,
                evicted=tuple(sorted(known.keys() - load.resident)),
                is_complete=before is None,
            )
        )

    @property
    def wait_s(self) -> float | None:
        """How long an idle engine may sleep before the next `poll`; None if that sends nothing."""
        return max(0.0, self._due_s - self._clock()) if self._postponed else None


class WatchedLoad:
    """The client's side: the load that the reports amount to."""

    def __init__(self, on_change: Callable[[EngineLoad, int], None]) -> None:
        """on_change: called after each report with the load and the number of requests taken (`LoadReport`)."""
        self._on_change = on_change
        self._resident: dict[str, str] | None = None

    def receive(self, report: LoadReport) -> None:
        """Apply a report. Those before the first complete one are for an earlier client of the engine."""
        if report.is_complete:
            self._resident = {}
        if self._resident is None:
            return
        for name in report.evicted:
            self._resident.pop(name, None)
        self._resident |= report.load.resident
        self._on_change(msgspec.structs.replace(report.load, resident=dict(self._resident)), report.num_taken)
