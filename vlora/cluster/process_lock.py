"""The lock of a replica's process: a file that it locks while it runs, with where it listens.

The system releases the lock when the process ends, in any way. So another process learns from the file whether the
replica runs, without being its parent, and without mistaking a later process with the same id for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from vlora.errors import BadConfig

_TRIES, _PAUSE_S = 20, 0.05  # others lock the file for an instant


class RunningReplica(msgspec.Struct, frozen=True):
    """A replica that serves.

    Attributes:
        settings: `digest` of the settings with which it was started.
    """

    host: str
    port: int
    pid: int
    engine_pid: int
    settings: str = ""


def digest(*settings: Any) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(settings, order="deterministic")).hexdigest()


def hold(path: str) -> int:
    """Lock a file for the rest of this process. Returns its descriptor.

    Raises:
        BadConfig: Another process holds it.
    """
    file = _open(path)
    for _ in range(_TRIES):
        if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return file
        time.sleep(_PAUSE_S)
    os.close(file)
    raise BadConfig(f"another process is the replica of {path}; end it first")


def publish(file: int, running: RunningReplica) -> None:
    """Write where this process listens, to a file that it holds."""
    os.pwrite(file, msgspec.json.encode(running) + b"\n", 0)


def find(path: str) -> RunningReplica | None:
    """Where the process that holds the file listens; None while it starts."""
    data = Path(path).read_bytes()
    return msgspec.json.decode(data, type=RunningReplica) if data.endswith(b"\n") else None


def clear(path: str) -> bool:
    """Empty the file before a process is started that will hold it. False: one holds it already."""
    file = _open(path)
    try:
        if not _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        os.ftruncate(file, 0)
        return True
    finally:
        os.close(file)


def wait_released(path: str) -> None:
    """Wait for the end of the process that holds the file."""
    file = _open(path)
    try:
        _lock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    return True
