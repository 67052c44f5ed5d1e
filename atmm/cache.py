"""The cache folder for compiled code."""

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
