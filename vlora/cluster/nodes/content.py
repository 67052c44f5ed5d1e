"""Digests of a model and of adapters on disk, to compare those of two machines before an engine loads them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from vlora.errors import BadConfig

_READ_BYTES = 1 << 20
"""Files up to this size are compared by content, as a model's configuration. Of weights the size counts."""


def model_digest(model: str) -> str:
    """Of a folder's files: names, sizes, and the content of small ones. Of a hub name or a packaged model, the name."""
    return _digest(Path(model), _READ_BYTES) if os.path.isdir(model) else f"name {model}"


def adapter_digest(folder: str) -> str:
    """Of an adapter's files, with their content.

    Raises:
        BadConfig: There is no adapter.
    """
    if not os.path.isfile(os.path.join(folder, "adapter_config.json")):
        raise BadConfig(f"{folder} has no adapter_config.json")
    return _digest(Path(folder), None)


def _digest(folder: Path, most_bytes: int | None) -> str:
    """most_bytes: of files that are read; None reads all."""
    found = hashlib.sha256()
    try:
        for file in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
            size = file.stat().st_size
            found.update(f"{file.name}\0{size}\0".encode())
            if most_bytes is None or size <= most_bytes:
                with file.open("rb") as opened:
                    found.update(hashlib.file_digest(opened, "sha256").digest())
    except OSError as error:
        raise BadConfig(f"{error.filename} cannot be read: {error.strerror}") from error
    return found.hexdigest()
