"""The desired state of a server's adapters: which names it serves, from which folder, with which content.

It may be kept in a file, which outlives the processes. The file is replaced as a whole by a rename after its content is
on the disk, so a crash at any time leaves the former state or the new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from vlora.cluster.adapter_store import locked
from vlora.errors import BadConfig, VLoraError, listed
from vlora.run_folder import NotWritten, remove_unfinished, write_whole
from vlora.types import ErrorValue

log = logging.getLogger("vlora.cluster")

FLUSH_S, RETRY_S = 1.0, 60.0
FILE, LOCK = "adapters.json", "adapters.lock"


def default_folder(environ: Mapping[str, str], model: str, host: str, port: int) -> Path:
    """`$XDG_DATA_HOME/vlora/served/PORT-HASH`, default `~/.local/share/vlora/served`: a folder for each model and
    address. Raises BadConfig if there is no home folder."""
    try:
        root = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    except RuntimeError as error:
        raise BadConfig("this user has no home folder; set XDG_DATA_HOME") from error
    return root / "vlora" / "served" / f"{port}-{hashlib.sha256(f'{host} {model}'.encode()).hexdigest()[:8]}"


class DesiredAdapter(msgspec.Struct, frozen=True):
    """One adapter.

    Attributes:
        version: The hash of its content; empty until a replica has read it.
    """

    path: str
    version: str = ""
    pinned: bool = False


class AdapterFailure(msgspec.Struct):
    """Why a replica is not as desired with one adapter, and when that is tried again.

    Attributes:
        bars: Whether it gets no requests of the adapter because of it.
        is_coming: The adapter's files are not there yet, and are being sent.
        has_arrived: They were sent, and the adapter was not tried again yet.
        pause_s: The time between two attempts.
        due_s: The time of the next attempt, in the loop's clock; infinite: another front end makes it.
    """

    error: ErrorValue
    bars: bool
    is_coming: bool = False
    has_arrived: bool = False
    pause_s: float = 0.0
    due_s: float = math.inf


class Goal(NamedTuple):
    """What the replicas should be like now.

    Attributes:
        kept: Contents by name to keep when others replace them.
        term: See `Lead`; None: another front end makes the changes, and this one only says which former contents it
            needs.
    """

    adapters: Mapping[str, DesiredAdapter]
    kept: Mapping[str, Collection[str]]
    term: int | None


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The file. given: the folders that the server was started with, by name."""

    adapters: dict[str, DesiredAdapter] = {}
    given: dict[str, str] = {}


class StartingAdapters(msgspec.Struct, frozen=True):
    """The outcome of comparing the given folders with the state at a start.

    Attributes:
        new: Folders to register, by name: given for the first time, or other ones than at the start before.
        loaded: Names that were given as before, and are served from the folder that was loaded later.
        unloaded: Names that were given as before, and were unloaded later.
        dropped: Names that a start before was given, and this one was not.
    """

    new: dict[str, str]
    loaded: tuple[str, ...]
    unloaded: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """For the operator: where the state wins over the command line, and what has changed there."""
        found = {
            "served as loaded later, not from the given folder": self.loaded,
            "unloaded later, and not served": self.unloaded,
            "not given any more, and not served": self.dropped,
        }
        return tuple(f"adapters {what}: {listed(names)}" for what, names in found.items() if names)


class AdapterState:
    """The adapters by name, in memory and, if opened with a folder, in a file there.

    Attributes:
        adapters: By name. Not to be changed by callers.
        folder: Of the file; None without one.
    """

    def __init__(self) -> None:
        """Begin without adapters and without a file."""
        self.adapters: dict[str, DesiredAdapter] = {}
        self.folder: Path | None = None
        self._given: dict[str, str] = {}
        self._lock_file = -1
        self._writing = asyncio.Lock()
        self._dirty = False
        self._flushing: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, folder: str | Path) -> AdapterState:
        """Read the file of a folder, which is made if it does not exist. No other process can open it until `close`.

        Raises:
            BadConfig: The folder cannot be used, another server uses it, or its file cannot be read.
        """
        self = cls()
        self.folder = Path(folder)
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if (lock := locked(self.folder / LOCK)) is None:
                raise BadConfig(f"another server uses {self.folder}; give each server a folder of its own")
            self._lock_file = lock
            remove_unfinished(self.folder)
            data = (self.folder / FILE).read_bytes()
            stored = msgspec.json.decode(data, type=_Stored)
        except FileNotFoundError as error:
            if self._lock_file < 0:
                raise BadConfig(f"{self.folder}: the folder above it does not exist; make it first") from error
            return self  # there is no state yet
        except OSError as error:
            self.close()
            raise BadConfig(f"{self.folder}: the adapters' state cannot be kept there: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.close()
            raise BadConfig(
                f"{self.folder / FILE} is not a state of adapters ({error}); move it away to begin with the adapters "
                "of the command line"
            ) from error
        self.adapters, self._given = stored.adapters, stored.given
        return self

    def __contains__(self, name: object) -> bool:
        return name in self.adapters

    def begin(self, given: Mapping[str, str]) -> StartingAdapters:
        """Compare the folders that a server is started with, by name, with the state. The first `commit` writes it.

        The later word counts for each name. A given folder that is another one than at the start before is new, and
        wins over the state. One that is the same was given before all that is in the state, so the state wins.
        """
        before, self._given = self._given, dict(given)
        new = {name: path for name, path in given.items() if before.get(name) != path}
        removed = [name for name in before if name not in given]
        dropped = [name for name in removed if name in self.adapters and self.adapters[name].path == before[name]]
        self.adapters = {name: each for name, each in self.adapters.items() if name not in new and name not in dropped}
        same = sorted(given.keys() - new.keys())
        return StartingAdapters(
            new=new,
            loaded=tuple(name for name in same if name in self.adapters and self.adapters[name].path != given[name]),
            unloaded=tuple(name for name in same if name not in self.adapters),
            dropped=tuple(dropped),
        )

    def is_given(self, name: str) -> bool:
        """Whether the command line gives an adapter, with the folder that is served."""
        return name in self.adapters and self._given.get(name) == self.adapters[name].path

    async def commit(self, changes: Mapping[str, DesiredAdapter | None]) -> None:
        """Change adapters by name, None to remove one. The change is on the disk when this returns.

        Raises:
            VLoraError: The file cannot be written; nothing has changed.
        """
        async with self._writing:
            await self._write(_changed(self.adapters, changes))
            self.adapters = _changed(self.adapters, changes)  # contents may have been adopted meanwhile

    def adopt(self, name: str, version: str) -> None:
        """Note the content of an adapter that is read for the first time. It is written soon."""
        self.adapters[name] = msgspec.structs.replace(self.adapters[name], version=version)
        self._flush_soon()

    def take_over(self, adapters: Mapping[str, DesiredAdapter]) -> None:
        """Have the adapters of another front end of the service. They are written soon."""
        if adapters != self.adapters:
            self.adapters = dict(adapters)
            self._flush_soon()

    async def flush(self) -> None:
        """Write the contents that were adopted. Raises VLoraError if the file cannot be written."""
        async with self._writing:
            if self._dirty:
                self._dirty = False
                try:
                    await self._write(self.adapters)
                except VLoraError:
                    self._dirty = True
                    raise

    def _flush_soon(self) -> None:
        self._dirty = True
        if self.folder is not None and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        pause_s = FLUSH_S
        while self._dirty:
            await asyncio.sleep(pause_s)
            try:
                await self.flush()
            except VLoraError as error:
                log.warning("%s; retrying", error)
                pause_s = RETRY_S

    def close(self) -> None:
        """Let other processes open the folder."""
        if self._flushing is not None:
            self._flushing.cancel()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    async def _write(self, adapters: Mapping[str, DesiredAdapter]) -> None:
        if self.folder is None:
            return
        data = msgspec.json.format(msgspec.json.encode(_Stored(dict(adapters), self._given)), indent=1)
        writing = asyncio.ensure_future(asyncio.to_thread(write_whole, self.folder / FILE, data, mode=0o600))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})  # another write must not begin before its end
            raise
        except OSError as error:
            raise NotWritten(
                f"{self.folder / FILE} cannot be written, so the adapters were not changed: {error.strerror}"
            ) from error


def _changed(
    adapters: Mapping[str, DesiredAdapter], changes: Mapping[str, DesiredAdapter | None]
) -> dict[str, DesiredAdapter]:
    changed = {**adapters, **changes}
    return {name: each for name, each in changed.items() if each is not None}
