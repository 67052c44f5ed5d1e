"""Locks of processes: files that a process locks while it runs, and where a replica that holds one listens.

The system releases a lock when the process ends, in any way. So another process learns from the file whether the holder
runs, without being its parent, and without mistaking a later process with the same id for it.
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

_LOOK_S = 0.02
_INSTANT_S = 1.0  # others that look at a lock hold it for an instant


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


def locked(path: str | Path, *, shared: bool = False, wait_s: float = 0.0) -> int | None:
    """Lock a file, which is created if it is missing; None if another process has locked it otherwise.

    Whoever has the exclusive lock may remove the file.

    Args:
        wait_s: How long to try.

    Returns:
        Its descriptor, which is to be closed.
    """
    ends_s = time.monotonic() + wait_s
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
            os.close(file)
        except BlockingIOError:
            os.close(file)
            if time.monotonic() >= ends_s:
                return None
            time.sleep(_LOOK_S)
        except FileNotFoundError:  # removed meanwhile
            os.close(file)
        except BaseException:
            os.close(file)
            raise


def hold(path: str) -> int:
    """Lock a file for the rest of this process. Returns its descriptor.

    Raises:
        BadConfig: Another process holds it.
    """
    if (file := locked(path, wait_s=_INSTANT_S)) is None:
        raise BadConfig(f"another process is the replica of {path}; end it first")
    return file


def publish(file: int, running: RunningReplica) -> None:
    """Write where this process listens, to a file that it holds."""
    os.pwrite(file, msgspec.json.encode(running) + b"\n", 0)


def find(path: str) -> RunningReplica | None:
    """Where the process that holds the file listens; None while it starts."""
    data = Path(path).read_bytes()
    return msgspec.json.decode(data, type=RunningReplica) if data.endswith(b"\n") else None


def clear(path: str) -> bool:
    """Empty the file before a process is started that will hold it. False: one holds it already."""
    if (file := locked(path)) is None:
        return False
    os.ftruncate(file, 0)
    os.close(file)
    return True


def wait_released(path: str) -> None:
    """Wait for the end of the process that holds the file."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)
