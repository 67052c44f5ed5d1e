"""What the frozen vision tower made of pictures, kept on disk by the content of both."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


class FeatureCache:
    """Features of groups of pictures. tower: the hash of the weights that make them."""

    def __init__(self, folder: Path, tower: str) -> None:
        self._folder = folder
        self._tower = tower
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, contents: Sequence[str]) -> list[torch.Tensor] | None:
        """Rows [num_tokens, hidden] of each picture by its content hash; None unless all of the group are there."""
        try:
            found = load_file(self._file(contents))
        except (FileNotFoundError, SafetensorError):  # a torn file is made again
            return None
        return list(found["rows"].split(found["counts"].tolist()))

    def put(self, contents: Sequence[str], rows: Sequence[torch.Tensor]) -> None:
        file = self._file(contents)
        temporary = file.with_suffix(f".{os.getpid()}")
        counts = torch.tensor([len(one) for one in rows])
        save_file({"rows": torch.cat(list(rows)).cpu(), "counts": counts}, temporary)
        temporary.replace(file)

    def _file(self, contents: Sequence[str]) -> Path:
        key = hashlib.sha256(" ".join((self._tower, *contents)).encode()).hexdigest()
        return self._folder / f"{key}.safetensors"
