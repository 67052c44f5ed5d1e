"""Locks on files and folders that two processes at once would corrupt, such as a run's features and adapters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig
from vlora.writing import writing

_FILE = "in-use"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create a folder and lock it. The kernel releases the lock however this process ends.

    Raises:
        BadConfig: the folder cannot be created, or another process, which the message names, has locked it.
    """
    try:
        with writing(folder, only_disks=True):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"{error.filename} cannot be created: {error.strerror}; choose another folder") from error
    with lock_file(folder / _FILE, str(folder), "folder"):
        yield


@contextlib.contextmanager
def lock_file(lock: Path, locked: str, kind: str) -> Iterator[None]:
    """Create a file and lock it. The kernel releases the lock however this process ends.

    Args:
        locked, kind: in messages, what is in use and what to choose instead.

    Raises:
        BadConfig: the file cannot be created or locked, or another process, which the message names, has locked it.
    """
    try:
        with writing(lock, only_disks=True):
            holding = lock.open("a+")
    except OSError as error:
        raise BadConfig(f"{lock} cannot be created: {error.strerror}; choose another {kind}") from error
    # The file is never removed: a process with the old file open and one with a new file would both hold a lock.
    with holding as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise BadConfig(
                f"{locked} is in use by {holder}; wait for it, stop it, or choose another {kind}"
            ) from error
        except OSError as error:  # a file system without locks
            raise BadConfig(f"{lock} cannot be locked: {error.strerror}; choose another {kind}") from error
        with contextlib.suppress(OSError):  # a full disk: the lock holds, its holder is not named
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        yield
