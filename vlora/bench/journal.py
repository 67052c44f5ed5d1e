"""Results of a long bench, written one by one, so that an interrupted run can resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Values by name, one JSON line each, in a file that exists until `close`; in memory only without a file.

    Args:
        path: The file, or None.
        of: The identity of the values, such as the commit. A file with another identity is overwritten, and a truncated
            line is ignored.
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
        """The value of that name as JSON decodes it; computed by `make` if it is not known yet."""
        if name not in self._known:
            line = _line(name, make())
            self._known.update([json.loads(line)])
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(line)
        return self._known[name]

    def close(self) -> None:
        """Delete the file of a complete run, so that the next run starts from scratch."""
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
