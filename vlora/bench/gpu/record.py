"""The JSON file of a stage, and the identity of the code that it measured."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
_PACKAGES = ("vlora", "atmm", "heads", "benchmarks", "tests")
_SUFFIXES = {".py", ".cpp", ".cu", ".h"}


class Code(NamedTuple):
    """The measured code."""

    commit: str | None  # the checkout's commit; None outside a git repository
    digest: str  # of the source files, so that changes after the commit count, and checkouts without git are known

    @classmethod
    def here(cls) -> Code:
        digest = hashlib.sha256()
        for path in _sources():
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
        return cls(_commit(), digest.hexdigest()[:16])


def _sources() -> Iterator[Path]:
    for package in _PACKAGES:
        yield from sorted(path for path in (ROOT / package).rglob("*") if path.suffix in _SUFFIXES)


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the file atomically: if this process is ended, the old record or the new one remains."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(record, indent=1, default=str) + "\n")
    os.replace(fresh, path)


def read(path: Path) -> dict[str, Any] | None:
    """A stage's record; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_current(record: Mapping[str, Any] | None, code: Code, device: str) -> bool:
    """Whether the stage has succeeded with this code on this kind of device."""
    return record is not None and record.get("ok") is True and _identity(record) == (code.digest, device)


def _identity(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record.get("digest"), record.get("device")


def unmet(record: Mapping[str, Any]) -> Sequence[str]:
    """The names of the goals that a record does not meet."""
    return [goal["name"] for goal in record.get("goals", ()) if not goal["holds"]]
