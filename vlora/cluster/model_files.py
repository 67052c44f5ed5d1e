"""A model on other machines: where it is there, and whether it is the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from vlora.errors import BadConfig

_COMPARED_BYTES = 1 << 20
_PACKAGES, _PREFIX = Path(__file__).parents[2], "package:"


def portable(model: str) -> str:
    """A model for other machines: one in this package is elsewhere there, as it is installed."""
    if not os.path.isdir(model):
        return model
    path = Path(os.path.abspath(model))
    inside = path.is_relative_to(_PACKAGES / "fusion")
    return f"{_PREFIX}{path.relative_to(_PACKAGES)}" if inside else str(path)


def own_path(model: str) -> str:
    """What `portable` has made of a model, on this machine."""
    return str(_PACKAGES / model.removeprefix(_PREFIX)) if model.startswith(_PREFIX) else model


def model_digest(model: str) -> str:
    """Of a folder's files: names, sizes, and the content of small ones, as a configuration. Of a hub name, the name."""
    if not os.path.isdir(model):
        return f"name {model}"
    found = hashlib.sha256()
    try:
        for file in sorted(path for path in Path(model).iterdir() if path.is_file() and path.name[0] != "."):
            size = file.stat().st_size
            found.update(f"{file.name}\0{size}\0".encode())
            if size <= _COMPARED_BYTES:
                found.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError as error:
        raise BadConfig(f"{error.filename} cannot be read: {error.strerror}") from error
    return found.hexdigest()
