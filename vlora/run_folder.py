"""Folders of work: locks, and writes that leave the former content or the new one, however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig, VLoraError

UNFINISHED = "unfinished-"
"""Prefix of the names of files and folders that are being written."""
_LOCK = "in-use"
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_IN_A_MESSAGE = re.compile(r"\(os error (\d+)\)")  # of safetensors, which raises no OSError


class NotWritten(VLoraError, http_status=507):
    """A file cannot be written: its disk is full, or fails."""


@contextlib.contextmanager
def writing(place: str | os.PathLike[str], *, only_disks: bool = False) -> Iterator[None]:
    """Name a file or folder in errors of the block that writes it: NotWritten if the disk is full, or fails; BadConfig
    for any other OSError, unless only those of disks are named."""
    try:
        yield
    except Exception as error:
        found = _IN_A_MESSAGE.search(str(error))
        cause = error.__context__ if "enforce fail" in str(error) else error  # of torch.save
        number = cause.errno if isinstance(cause, OSError) else found and int(found[1])
        named = getattr(error, "filename", None) or place
        if number in _OF_DISKS:
            raise NotWritten(f"cannot write {os.fspath(named)!r}: {os.strerror(number)}") from error
        if isinstance(error, OSError) and not only_disks:
            raise BadConfig(f"cannot write {os.fspath(place)!r}: {error.strerror}") from error
        raise


@contextlib.contextmanager
def whole(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A path for a file that replaces `path` when the block ends, or for a folder that becomes `path`.

    A folder that exists by then stays: another process has written the same. If the block raises, nothing new remains,
    which would keep a full disk full. durable: content and name are on disk when the block has ended.
    """
    part = path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")
    remove(part)  # of a killed process with the same number
    try:
        yield part
        if durable:
            for written in (*part.rglob("*"), part):
                sync(written)
        try:
            os.replace(part, path)
        except OSError:
            if not (part.is_dir() and path.is_dir()):
                raise
            remove(part)
        if durable:
            sync(path.parent)
    except BaseException:
        remove(part)
        raise


def write_whole(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace a file's content. mode: before the umask applies. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with whole(path, durable=durable) as part, open(os.open(part, flags, mode), "wb") as file:
        file.write(data)


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that was appended to, without one that was cut; none if there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def append(path: Path, line: bytes, *, durable: bool = True) -> None:
    """Add a line to a file that only its owner may read. Raises OSError, with nothing added, if it is not on disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    size = os.fstat(descriptor).st_size
    try:
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # after a line that a full disk has cut
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if durable:
            os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):  # a whole line would count after a restart
            os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)
    if durable and not size:
        sync(path.parent)


def sync(path: Path) -> None:
    """Write a file, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a folder or a file, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Delete what processes that were killed were writing in a folder, which this process has locked."""
    for left in folder.glob(f"{UNFINISHED}*"):
        remove(left)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create and lock a folder. Raises BadConfig, with the process that has locked it, or why it cannot be created."""
    try:
        with writing(folder, only_disks=True):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"{error.filename} cannot be created: {error.strerror}; choose another folder") from error
    with lock_file(folder / _LOCK, str(folder), "folder"):
        yield


@contextlib.contextmanager
def lock_file(lock: Path, locked: str, kind: str) -> Iterator[None]:
    """Create and lock a file. The kernel releases the lock however this process ends. Raises BadConfig.

    Args:
        locked, kind: in messages, what is in use and what to choose instead.
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
