"""The conditions under which a stage runs: its device, its folder, and its time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Context:
    """The conditions of one stage.

    Attributes:
        device: The device to measure.
        out: The folder of the results, for files that are results by themselves.
        ends_s: The time on `time.monotonic` at which the stage is ended.
        keep: Writes the results so far, which are lost otherwise if the stage is ended before it returns.
    """

    device: torch.device
    out: Path
    ends_s: float
    keep: Callable[[dict[str, Any]], None]

    @property
    def on_gpu(self) -> bool:
        """Whether shapes are those of a 7B model; on a CPU they are small."""
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the stage is ended."""
        return self.ends_s - time.monotonic()

    def while_time(self, items: Iterator[Any] | list[Any], reserve_s: float) -> Iterator[Any]:
        """The items, until only `reserve_s` seconds are left."""
        for item in items:
            if self.left_s < reserve_s:
                return
            yield item

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
