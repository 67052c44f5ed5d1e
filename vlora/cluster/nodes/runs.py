"""The heads, nodes and front ends that a user runs on this machine, for `vlora cluster down`, which ends no others.

Each locks a file with its process id while it runs. The system releases the lock at any end, so an id in a locked file
is never that of another process. A file without a lock has the folder of one that was killed, or of a head that has
ended while its replicas serve on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from vlora.cluster.on_ray.own_processes import end_all, end_ray, replica_processes
from vlora.cluster.on_ray.settings import Folder, is_private
from vlora.cluster.process_lock import locked
from vlora.errors import BadConfig

FRONT_END, NODE, HEAD = KINDS = ("front end", "node", "head")
"""In the order in which they end."""

_LOOK_S = 0.1
_INSTANT_S = 0.2  # `running` locks the files for an instant


class Run(msgspec.Struct, frozen=True):
    """One of `KINDS`.

    Attributes:
        pid: Of the process that has the lock; 0 while `end_left` has it.
        folder: Its files; None before it has any.
    """

    kind: str
    address: str
    pid: int
    folder: Folder | None = None


def runs_folder() -> Path:
    """The folder of this user's files. Raises BadConfig if another user can write to it."""
    folder = Path(tempfile.gettempdir()) / f"vlora-cluster-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_own = is_private(folder)
    except OSError as error:
        raise BadConfig(f"{folder} cannot be created: {error.strerror}; set TMPDIR to a folder of yours") from error
    if not is_own:
        raise BadConfig(f"{folder} belongs to another user or can be used by others; remove it, or set TMPDIR")
    return folder


class Entry:
    """The file of a run.

    Attributes:
        former: The folder of an earlier head, if replicas of it serve on; None otherwise.
    """

    def __init__(self, file: BinaryIO, kind: str, address: str) -> None:
        self.former: Folder | None = None
        self._file = file
        self._run = Run(kind, address, os.getpid())

    def note(self, folder: Folder | None) -> None:
        self._run = msgspec.structs.replace(self._run, folder=folder)
        _write(self._file, self._run)

    def end(self) -> None:
        """Forget the run, unless its folder is left: replicas serve on, or an error has interrupted its end."""
        if self._run.folder is None or not os.path.exists(self._run.folder.path):
            self._file.truncate(0)


@contextlib.contextmanager
def registered(kind: str, address: str) -> Iterator[Entry]:
    """Be found by `running` for the block.

    Processes and files of an earlier one that was killed are removed, except for the replicas of a head.

    Raises:
        BadConfig: One of this kind runs already on this machine for the address.
    """
    path = runs_folder() / f"{kind} {address}".translate(str.maketrans(" :/", "---"))
    if (lock := locked(path, wait_s=_INSTANT_S)) is None:
        found = _read(path.read_bytes())
        if found is not None and not found.pid:
            raise BadConfig(
                f"`vlora cluster down` ends what an earlier {kind} of {address} has left here; start it again"
            )
        by = f" (process {found.pid})" if found else ""
        raise BadConfig(f"a {kind} of {address} runs already on this machine{by}; `vlora cluster down` ends it")
    with open(lock, "r+b") as file:
        found = _read(file.read())
        entry = Entry(file, kind, address)
        entry.note(None if found is None else found.folder)  # first, as another process may have the former id by now
        if found is not None and found.folder is not None:
            if kind == HEAD and replica_processes(found.folder):
                end_ray(found.folder)
                entry.former = found.folder
            else:
                end_run(found.folder)
        entry.note(entry.former)
        try:
            yield entry
        finally:
            entry.end()


def end_run(folder: Folder) -> None:
    end_all(folder)
    folder.remove()


def running() -> list[Run]:
    """Those that run, in the order in which they should end."""
    found = []
    for path in sorted(runs_folder().iterdir()):
        if (lock := locked(path, shared=True)) is not None:
            os.close(lock)
        elif (run := _read(path.read_bytes())) and run.pid:
            found.append(run)
    return sorted(found, key=lambda run: KINDS.index(run.kind))


def end(run: Run, timeout_s: float) -> bool:
    ends_s = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pid, signal.SIGTERM)
    while any((each.kind, each.pid) == (run.kind, run.pid) for each in running()):
        if time.monotonic() > ends_s:
            return False
        time.sleep(_LOOK_S)
    return True


def end_left() -> list[Run]:
    """End what killed runs have left on this machine, and the replicas of heads that have ended. Returns their runs."""
    found = []
    for path in sorted(runs_folder().iterdir()):
        if (lock := locked(path)) is None:
            continue
        with open(lock, "r+b") as file:  # locked, so that no later head takes the replicas over meanwhile
            if run := _read(file.read()):
                _write(file, msgspec.structs.replace(run, pid=0))  # another process may have the id by now
                if run.folder is not None:
                    end_run(run.folder)
                file.truncate(0)
                found.append(run)
    return found


def _write(file: BinaryIO, run: Run) -> None:
    file.seek(0)
    file.truncate()
    file.write(msgspec.json.encode(run))
    file.flush()


def _read(data: bytes) -> Run | None:
    """None while it is being written."""
    try:
        return msgspec.json.decode(data, type=Run)
    except msgspec.MsgspecError:
        return None
