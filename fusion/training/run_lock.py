"""One process at a time in a run's folder: two would tear each other's features, trainings and adapters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig

_FILE = "in-use"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a folder and hold it. The kernel lets go of it however this process ends, so that what is left after a kill
    holds nothing. Raises BadConfig for a folder that cannot be made, and naming the process that has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holding = (folder / _FILE).open("a+")
    except OSError as error:
        raise BadConfig(f"{error.filename} cannot be made: {error.strerror}; take another folder") from error
    # Never removed: a process that waits with the old file open, and one that makes a new one, would both hold it.
    with holding as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise BadConfig(
                f"{folder} is in use by {holder}; wait for it or stop it, or take another folder"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        file.flush()
        yield
