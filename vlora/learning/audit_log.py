"""The audit log: decisions about an adapter, with time, caller and reason. The last one sets the served version."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from vlora.errors import BadConfig
from vlora.run_folder import append

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
