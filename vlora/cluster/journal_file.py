"""A file of a router's calls, for `vlora simulate --replay`."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable
from typing import BinaryIO

from vlora.errors import BadConfig

log = logging.getLogger("vlora.cluster")

MAX_BYTES = 256 << 20
MAX_EARLIER, MAX_EARLIER_BYTES = 100, 1 << 30
"""Of the records of earlier starts; the first ones over either limit are removed."""

_BUFFER_BYTES = 1 << 16
_FLUSH_S = 1.0
_EMPTY_BYTES = 1 << 16  # a longer record has requests


class JournalFile:
    """The file, from its first line until it is full: a record is of use from its beginning only.

    It has names of adapters and tenants, ids of requests and hashes of prompts, so only this user can read it. Neither
    a full disk nor a full file disturbs serving: the record ends with a warning.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """Create it. Earlier ones are kept as `path`.1, `path`.2 and so on, the latest one with the highest number.

        Raises:
            BadConfig: It cannot be written, or another server writes it.
        """
        self._path = path
        self._left = max_bytes
        self._clock = clock
        self._flushed_s = clock()
        self._file: BinaryIO | None = None
        try:
            descriptor = _locked(path, 0)
            if os.fstat(descriptor).st_size:
                _set_aside(path)
                os.close(descriptor)
                descriptor = _locked(path, os.O_EXCL)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.fchmod(descriptor, 0o600)  # one that was there before may be readable by others
        except BlockingIOError:
            raise BadConfig(
                f"--routing-journal {path} is being written by another server; choose another file"
            ) from None
        except OSError as error:
            raise BadConfig(f"--routing-journal {path} cannot be written: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)

    def write(self, line: bytes) -> None:
        """Append a line, unless the record has ended."""
        if self._file is None:
            return
        self._left -= len(line) + 1
        if self._left < 0:
            log.warning("the routing journal %s is full and ends here; serving goes on", self._path)
            self.close()
            return
        try:
            self._file.write(line + b"\n")
            if (now := self._clock()) - self._flushed_s > _FLUSH_S:
                self._flushed_s = now
                self._file.flush()
        except OSError as error:
            log.warning("the routing journal %s ends here: %s; serving goes on", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _locked(path: str, flags: int) -> int:
    """The descriptor of the file.

    Raises BlockingIOError if another process has locked it, or has replaced it since it was opened.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | flags, 0o600)  # no wait for a pipe's reader
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise BlockingIOError
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _set_aside(path: str) -> None:
    """Keep the record of an earlier start. Its names never change, so that a replay can refer to them.

    One without a request is not kept: a server that fails again and again would displace the others.
    """
    if _has_no_request(path):
        os.unlink(path)
        return
    os.replace(path, f"{path}.{max(_numbers(path), default=0) + 1}")
    left = MAX_EARLIER_BYTES
    for place, number in enumerate(sorted(_numbers(path), reverse=True)):
        with contextlib.suppress(OSError):
            left -= os.lstat(f"{path}.{number}").st_size
            if place and (left < 0 or place >= MAX_EARLIER):
                os.unlink(f"{path}.{number}")


def _numbers(path: str) -> list[int]:
    folder, name = os.path.split(path)
    found = re.compile(rf"{re.escape(name)}\.([1-9][0-9]{{0,8}})")
    return [int(match[1]) for match in map(found.fullmatch, os.listdir(folder or ".")) if match is not None]


def _has_no_request(path: str) -> bool:
    """Whether a file is a record that ended before the first request. Other files are kept."""
    with open(path, "rb") as file:
        data = file.read(_EMPTY_BYTES + 1)
    return len(data) <= _EMPTY_BYTES and data.startswith(b'{"rule": ') and b'\n["submit",' not in data
