"""The cache folder for compiled code and measurements, and how their files are written."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """`$XDG_CACHE_HOME/vlora`, default `~/.cache/vlora`. The folder may not exist yet.

    Raises:
        FileNotFoundError: if the variable is not set and the user has no home folder, which is common in containers.
    """
    configured = os.environ.get("XDG_CACHE_HOME")
    if configured:
        return Path(configured) / "vlora"
    try:
        return Path.home() / ".cache" / "vlora"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home folder and XDG_CACHE_HOME is not set") from error


def replace(file: Path, text: str) -> None:
    """Write a file whole: another process may read it or write it meanwhile, and this one may be interrupted."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}.new")
    try:
        fresh.write_text(text)
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)  # of a full disk
