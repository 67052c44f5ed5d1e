"""Results of a long bench, written down one by one, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Values by name, a line of JSON each, in a file that is there until `close`; in memory only without a file.

    of: what the values belong to, such as the commit. A file that was begun for something else is begun anew, and a
    line that was cut off while it was written counts as not there.
    """

    def __init__(self, path: Path | None, of: Any) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is None:
            return
        lines = path.read_text().splitlines() if path.is_file() else []
        read = [entry for entry in map(_entry, lines) if entry is not None]
        if read[:1] != [("of", of)]:
            read = [("of", of)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(_line(*entry) for entry in read))
        self._known.update(read)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of that name as JSON reads it back; what `make` returns, where it is not known yet."""
        if name not in self._known:
            line = _line(name, make())
            self._known.update([json.loads(line)])
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(line)
        return self._known[name]

    def close(self) -> None:
        """All is done: the next run begins anew."""
        if self._path is not None:
            self._path.unlink()


def _line(name: str, value: Any) -> str:
    return json.dumps([name, value]) + "\n"


def _entry(line: str) -> tuple[str, Any] | None:
    try:
        name, value = json.loads(line)
    except (ValueError, TypeError):
        return None
    return name, value
