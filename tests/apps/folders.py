"""Folders that cannot be read, also where the tests run as root."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def refuse_to_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
