"""Waiting for other processes, and for their end."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 60.0
"""Upper limit for what other threads and processes do at once on an idle machine; only failures take so long."""


def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs. A process that has ended may remain as a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
