"""Where compiled code is kept."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """`$XDG_CACHE_HOME/vlora`, default `~/.cache/vlora`; may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlora"
