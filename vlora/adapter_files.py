"""The files of an adapter's folder that engines read, and the hash of their content. Loads without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
HEAD_FILES = ("heads.json", "heads.safetensors")
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, *HEAD_FILES)  # in the order of the hash


def content_hash(folder: Path) -> str:
    """The version of an adapter's content: the hash of its files. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for file in (folder / name for name in ADAPTER_FILES):
        if file.exists():
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                while piece := stream.read(2**20):
                    digest.update(piece)
    return digest.hexdigest()
