"""The audit log of one adapter, and which version of it is served: by the log, with the files, in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from vlora.adapter_files import CONFIG_FILE, DOMAINS_FILE, HEAD_FILES, WEIGHTS_FILE, content_hash
from vlora.errors import AdapterChanged, BadAdapter, BadConfig, BadRequest, VLoraError
from vlora.learning.evaluation import ServedModel
from vlora.learning.sample_store import SampleStore
from vlora.lora.peft_format import read_config
from vlora.run_folder import UNFINISHED, append, remove, remove_unfinished, sync
from vlora.types.learning import AdapterVersion, Comparison, VersionState

log = logging.getLogger(__name__)
Event = Literal["imported", "training", "training_ended", "evaluated", "promoted", "rolled_back"]
SERVER = "server"
"""The name in the audit log for decisions without a caller."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the audit log.

    Attributes:
        at: Seconds since 1970.
        time: The same as text, in UTC.
        event: Imported, promoted and rolled_back change the served version; each is written before it takes effect.
        by: Name of the token, `SERVER`, or "operator" on a server without tokens.
        version: That is evaluated, or served from now on.
        before: The version that was served.
        why: Reason, or the result.
        details: Accuracies and bounds. taken_back: this version has been served all the time.
    """

    at: float
    time: str
    event: Event
    by: str
    version: str = ""
    before: str = ""
    why: str = ""
    details: dict[str, Any] = {}


class Served(NamedTuple):
    """The version that is served, and those that were served before, the last one at the end."""

    version: str
    before: tuple[str, ...]


class AuditLog:
    """An append-only file of JSON lines. Each line is on disk before `append` returns."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        """Read the file, if there is one. Raises BadConfig if it cannot be read."""
        self._file = file
        self._clock = clock
        self.entries: list[Entry] = []
        try:
            self.entries.extend(_read(file))
        except OSError as error:
            raise BadConfig(f"the audit log {file} cannot be read: {error.strerror}") from error

    def append(self, event: Event, by: str, **fields: Any) -> Entry:
        """Add a line. Raises OSError, with nothing added, if it cannot be written."""
        at = self._clock()
        text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        entry = Entry(at=at, time=text, event=event, by=by, **fields)
        append(self._file, msgspec.json.encode(entry) + b"\n")
        self.entries.append(entry)
        return entry

    def served(self) -> Served | None:
        """The version that is served by the last decision; None before the first one.

        A roll-back returns to a version, and forgets those that were served since.
        """
        order: list[str] = []
        for entry in self.entries:
            if entry.event in ("imported", "promoted"):
                order = [one for one in order if one != entry.version] + [entry.version]
            elif entry.event == "rolled_back":
                place = order.index(entry.version) + 1 if entry.version in order else 0
                order = order[:place] or [entry.version]
        return Served(order[-1], tuple(order[:-1])) if order else None

    def last(self, version: str, *events: Event) -> Entry | None:
        """The last entry of these kinds about a version, but none that only takes a failed promotion back."""
        found = (one for one in reversed(self.entries) if _began(one, version) and one.event in events)
        return next(found, None)

    def num_evaluations(self, present: str) -> int:
        """Completed evaluations against a version since it has been served."""
        count = 0
        for entry in reversed(self.entries):
            if entry.event in ("imported", "promoted", "rolled_back") and _began(entry, present):
                break
            count += entry.event == "evaluated" and entry.before == present and "live" in entry.details
        return count


def _began(entry: Entry, version: str) -> bool:
    return entry.version == version and not entry.details.get("taken_back")


def _read(file: Path) -> Iterator[Entry]:
    """The lines; those that were cut by a full disk are left out."""
    if not file.exists():
        return
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line:
            try:
                yield msgspec.json.decode(line, type=Entry)
            except (msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError):
                log.warning("%s, line %d is no entry of an audit log and is ignored", file, number)


T = TypeVar("T")


class VersionFolder:
    """A bounded number of contents of an adapter, in folders named by their hashes.

    A folder appears as a whole, with its files on disk, or not at all.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            remove(folder / "incoming.part")  # as earlier versions named it
            remove_unfinished(folder)

    @property
    def versions(self) -> list[str]:
        found = [one for one in self._folder.iterdir() if one.is_dir() and one.name.isalnum()]
        return [one.name for one in sorted(found, key=lambda one: one.stat().st_mtime_ns)]

    def path(self, version: str) -> Path:
        return self._folder / version

    def add(self, source: Path, before: str = "") -> str:
        """Copy an adapter's files. Returns the hash of what was copied.

        Args:
            before: The version whose domains it has, if its own files declare none.

        Raises:
            BadAdapter: The files cannot be copied, or there are task heads.
        """
        part = self._folder / f"{UNFINISHED}copy"
        read_config(source)
        if headed := [name for name in HEAD_FILES if (source / name).exists()]:
            raise BadAdapter(f"{source} has task heads ({headed[0]}), which later versions would lack; it cannot learn")
        try:
            remove(part)
            part.mkdir()
            declared = [file for place in (source, self.path(before)) if (file := place / DOMAINS_FILE).exists()]
            for file in (source / CONFIG_FILE, source / WEIGHTS_FILE, *declared[:1]):
                shutil.copyfile(file, part / file.name)
                sync(part / file.name)
            sync(part)
            version = content_hash(part)
            if self.path(version).is_dir() and self.is_intact(version):
                os.utime(self.path(version))
                remove(part)
            else:
                remove(self.path(version))
                part.rename(self.path(version))
            sync(self._folder)
        except OSError as error:
            raise BadAdapter(f"the adapter in {source} cannot be copied to {self._folder}: {error}") from error
        return version

    def is_intact(self, version: str) -> bool:
        try:
            return self.path(version).is_dir() and content_hash(self.path(version)) == version
        except OSError:
            return False

    def prune(self, kept: Collection[str], most: int) -> None:
        """Remove the oldest contents above `most`, but none of `kept`."""
        others = [one for one in self.versions if one not in kept]
        for version in others[: max(0, len(others) + len(kept) - most)]:
            shutil.rmtree(self.path(version), ignore_errors=True)


class Versions:
    """Used from one event loop. Files are read and written by the executor's only thread.

    A change is written to the audit log before it takes effect. After a process that dies between the two, the next one
    serves the audit log's version.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        initial: Path | None,
        model: ServedModel,
        executor: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the folder, which is locked. Arguments and exceptions are those of `Learner`."""
        self.name = name
        self._model = model
        self._executor = executor
        self.audit_log = AuditLog(folder / "trail.jsonl", clock)
        self.files = VersionFolder(folder / "versions")
        self._loaded = self._begin_with(folder, initial)
        self._changing = asyncio.Lock()

    @property
    def served(self) -> Served:
        """The version by the audit log; during a change, the next one."""
        served = self.audit_log.served()
        assert served is not None, "a version is imported before anything else"
        return served

    @property
    def present(self) -> str:
        return self.served.version

    @property
    def loaded(self) -> str:
        """The version that the engine has for new requests; empty during a change."""
        return "" if self._changing.locked() else self._loaded

    def _begin_with(self, folder: Path, initial: Path | None) -> str:
        """The version to serve: by the audit log, else the initial one."""
        served = self.audit_log.served()
        if served is None:
            if initial is None:
                raise BadConfig(
                    f"adapter {self.name!r} learns, but there is none yet; give --adapter {self.name}=FOLDER, "
                    "which is copied at the first start"
                )
            version = self.files.add(initial)
            self.audit_log.append("imported", SERVER, version=version, why=f"from {initial}")
            return version
        for version in reversed((*served.before, served.version)):
            if self.files.is_intact(version):
                break
            log.warning("version %s of adapter %r is damaged", version, self.name)
        else:
            raise BadConfig(
                f"{folder} has no intact version of adapter {self.name!r}; remove the folder, and give "
                f"--adapter {self.name}=FOLDER"
            )
        if version != served.version:
            why = "its files are damaged or missing"
            self.audit_log.append("rolled_back", SERVER, version=version, before=served.version, why=why)
        return version

    async def promote(self, version: str, before: str, by: str, why: str, details: dict[str, Any]) -> None:
        """Serve another version. before: that is served now.

        Raises:
            AdapterChanged: Another one is served by now.
            BadAdapter, OverCapacity, BadRequest: It cannot be loaded; the version before is still served.
            OSError: The audit log cannot be written; the version before is still served.
        """
        async with self._changing:
            await self._check(version, before)
            await self.append("promoted", by, version=version, before=before, why=why, details=details)
            try:
                await self._load()
            except VLoraError as error:
                reason = f"it cannot be loaded: {error}"
                fields = {"why": reason, "details": {"taken_back": True}}
                await self.append("rolled_back", SERVER, version=before, before=version, **fields)
                raise

    async def return_to(self, version: str, before: str, by: str, why: str) -> None:
        """Serve an earlier version again. before: that is served now. Raises as `promote`."""
        async with self._changing:
            await self._check(version, before)
            await self.append("rolled_back", by, version=version, before=before, why=why)
            await self._load()

    async def restore(self) -> None:
        """Load the served version if the engine has another one, because a change could not be completed."""
        if self._loaded != self.present and not self._changing.locked():
            async with self._changing:
                await self._load()

    async def append(self, event: Event, by: str, **fields: Any) -> None:
        """Add to the audit log. Raises OSError."""
        await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: self.audit_log.append(event, by, **fields)
        )

    def chosen(self, version: str | None) -> str:
        """The version on disk that begins so; None: the last one that was evaluated and not promoted.

        Raises BadRequest if there is none, or several.
        """
        known = self.files.versions
        if version is not None:
            found = [one for one in known if one.startswith(version)] if version else []
            if len(found) != 1:
                shown = ", ".join(one[:12] for one in known)
                what = "no version begins" if not found else "several versions begin"
                raise BadRequest(f"{what} with {version[:40]!r} in adapter {self.name!r}; on disk: {shown}")
            return found[0]
        for entry in reversed(self.audit_log.entries):
            if entry.event == "evaluated" and entry.version in known and entry.version != self.present:
                return entry.version
        raise BadRequest(f"adapter {self.name!r} has no version that was evaluated and not promoted; name one")

    def prune(self, kept: Collection[str], most: int) -> None:
        """Remove the oldest contents above `most`, but not these, the present one, and the one before."""
        served = self.served
        self.files.prune({served.version, *served.before[-1:], *kept}, most)

    async def _load(self) -> None:
        """Give the name its present version. Requests that run keep theirs.

        Raises:
            BadAdapter: The engine has read other content.
        """
        version = self.present
        self._loaded = await self._model.load(self.name, self.files.path(version))
        if self._loaded != version:
            raise BadAdapter(f"the engine has read content {self._loaded}, not {version}, of adapter {self.name!r}")

    async def _check(self, version: str, before: str) -> None:
        if self.present != before:
            raise AdapterChanged(f"adapter {self.name!r} serves another version by now; try again")
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._executor, self.files.is_intact, version):
            raise BadRequest(f"version {version[:12]} of adapter {self.name!r} is damaged; choose another one")


def origin_of(audit_log: AuditLog, version: str) -> str:
    """Where a version comes from: a training, or a folder."""
    for entry in audit_log.entries:
        if entry.version == version:
            return str(entry.details.get("origin") or entry.why)
    return "unknown"


def describe(served: Served, audit_log: AuditLog, version: str, store: SampleStore) -> AdapterVersion:
    """A version on disk for operators."""
    evaluated = audit_log.last(version, "evaluated")
    began = audit_log.last(version, "imported", "promoted", "rolled_back")
    state: VersionState = "kept"
    if version == served.version:
        state = "present"
    elif version in served.before[-1:]:
        state = "previous"
    elif began is None and evaluated is not None:
        state = "refused"
    details = {} if evaluated is None else evaluated.details
    counts = store.served(version)
    last = began or evaluated
    return AdapterVersion(
        version=version,
        state=state,
        since=0.0 if last is None else last.at,
        origin=origin_of(audit_log, version),
        live=comparison_of(details.get("live")),
        trusted=comparison_of(details.get("trusted")),
        num_answers=sum(one.answered for one in counts),
        num_wrong=sum(one.wrong for one in counts),
    )


def comparison_of(fields: object) -> Comparison | None:
    return None if fields is None else msgspec.convert(fields, Comparison)
