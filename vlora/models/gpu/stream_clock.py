"""The clock of a GPU's work.

A launch returns before the device has computed anything, so the host's time does not measure a step. Marks are events
on the stream that runs the steps.
"""

from __future__ import annotations

import torch


class StreamClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3
