"""The log of replicas, on the front end's stderr. Ray's own has a prefix, and ends with the driver that began it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

_MOST_BYTES = 1 << 16


class LogPipe:
    """Copies lines from a named pipe to stderr. Belongs to the running event loop."""

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):  # replicas of a former process write to it
            os.mkfifo(path, 0o600)
        # Open for writing too, so that it does not end with the last replica.
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._copy)

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        self._copy()
        os.close(self._file)

    def _copy(self) -> None:
        with contextlib.suppress(BlockingIOError):
            *lines, self._rest = (self._rest + os.read(self._file, _MOST_BYTES)).split(b"\n")
            for line in lines:
                print(line.decode(errors="replace"), file=sys.stderr)


def open_pipe(path: str) -> int | None:
    """The descriptor for a replica's stderr; None if no front end reads the pipe."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
    os.set_blocking(file, True)
    return file
