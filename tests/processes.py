"""Waiting for other processes, and for their end, and ports for them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def in_child(work: Callable[..., object], *given: Any) -> int:
    """Run in a forked process. Returns its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(*given)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


class KillingItself:
    """Counts a process's file operations below a folder, and calls of `reach`; it kills the process at one of them."""

    _EVENTS = frozenset(("open", "shutil.copyfile", "shutil.rmtree")) | {
        f"os.{name}" for name in ("rename", "mkdir", "rmdir", "remove", "utime")
    }

    def __init__(self, folder: Path, at: int | None) -> None:
        self.folder, self.at, self.count = str(folder), at, 0
        sys.addaudithook(self._on_event)

    def reach(self, *_: object) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _on_event(self, event: str, args: tuple[object, ...]) -> None:
        if event in self._EVENTS and str(args[0]).startswith(self.folder):
            self.reach()


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
