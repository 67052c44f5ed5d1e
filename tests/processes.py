"""Waiting for other processes, and for their end, and ports for them."""

from __future__ import annotations

import itertools
import os
import socket
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


_ports = itertools.count(20_000 + os.getpid() % 10_000)


def free_port() -> int:
    """A free port below those that Linux chooses, so that no other process is given it before it is used."""
    for port in _ports:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError
