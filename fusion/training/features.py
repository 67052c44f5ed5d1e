"""Image features of the frozen vision tower, a file for each picture by the content of tower and picture, read on
demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from vlora.run_folder import remove_unfinished, write_whole, writing


class OnDisk(NamedTuple):
    """Features of a sample's pictures [image tokens, hidden * (1 + deepstack levels)], a file for each picture."""

    folder: Path
    names: tuple[str, ...]

    def rows(self) -> torch.Tensor:
        return torch.cat([load_file(self.folder / name)["rows"] for name in self.names])


class FeatureCache:
    """Features of pictures. tower: identifies the weights and the device that produce them."""

    def __init__(self, folder: Path, tower: str) -> None:
        self._folder = folder
        self._tower = tower
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)

    def get(self, samples: Sequence[Sequence[str]], compute: Callable[[], Sequence[torch.Tensor]]) -> list[OnDisk]:
        """Features of each sample, given as its pictures' content hashes. compute: called unless all are stored;
        returns those of each picture of each sample, in order."""
        found = [OnDisk(self._folder, tuple(map(self._name, pictures))) for pictures in samples]
        names = [name for one in found for name in one.names]
        if not all(map(self._is_stored, names)):
            for name, rows in zip(names, compute(), strict=True):
                with writing(self._folder / name):
                    write_whole(self._folder / name, save({"rows": rows.contiguous().cpu()}), durable=False)
        return found

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all features but these."""
        for file in self._folder.iterdir():
            if file.name not in names:
                file.unlink()

    def _is_stored(self, name: str) -> bool:
        try:
            with safe_open(self._folder / name, "pt"):
                return True
        except (FileNotFoundError, SafetensorError):  # a truncated file is written again
            return False

    def _name(self, picture: str) -> str:
        return f"{hashlib.sha256(f'{self._tower} {picture}'.encode()).hexdigest()}.safetensors"
