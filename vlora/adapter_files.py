"""The files of an adapter's folder, and the hash of their content. Loads without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
HEAD_FILES = ("heads.json", "heads.safetensors")
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, *HEAD_FILES)
"""All that an engine reads of a folder, in the order of the hash."""


def content_hash(folder: Path) -> str:
    """The version of an adapter's content: the hash of its files. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ADAPTER_FILES:
        file = folder / name
        if file.exists():
            digest.update(name.encode())
            with file.open("rb") as stream:
                while piece := stream.read(2**20):
                    digest.update(piece)
    return digest.hexdigest()
