"""A folder in which processes of one user meet."""

from __future__ import annotations

import tempfile
from pathlib import Path

_LONGEST_SOCKET_PATH = 100  # the system's limit for local sockets is 107 bytes


def private_folder(prefix: str, longest: str) -> Path:
    """A new folder that only this user can enter, with a path short enough for a local socket in it. longest: the
    longest name of one."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(folder / longest)) > _LONGEST_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    return folder
