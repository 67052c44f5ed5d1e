"""Image features of the frozen vision tower, a file for each picture by tower and content, read on demand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from vlora.run_folder import write_whole, writing

FEATURES_FORMAT = 1  # another one where the same encoder gives other features


class OnDisk(NamedTuple):
    """Features of a sample's pictures [image tokens, hidden * (1 + deepstack levels)], by their content hashes."""

    cache: FeatureCache
    pictures: tuple[str, ...]

    def rows(self) -> torch.Tensor:
        return torch.cat([load_file(self.cache.file(picture))["rows"] for picture in self.pictures])


class FeatureCache:
    """Features of pictures. tower: hash of everything that they depend on but the picture."""

    def __init__(self, folder: Path, tower: str) -> None:
        self._folder = folder
        self._tower = tower
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def file(self, picture: str) -> Path:
        return self._folder / f"{self._tower}-{picture}.safetensors"

    def get(
        self, samples: Sequence[Sequence[str]], compute: Callable[[Sequence[int]], Sequence[torch.Tensor]]
    ) -> list[OnDisk]:
        """Features of each sample, given as its pictures' content hashes. compute: called with the indices, over all
        samples, of pictures that are not stored, each content once. A stored file is not replaced: on a GPU, values
        depend on the batch, and trainings of this run may have read them."""
        pictures = itertools.chain.from_iterable(samples)
        missing = {picture: index for index, picture in enumerate(pictures) if not self._is_stored(picture)}
        if missing:
            for picture, rows in zip(missing, compute([*missing.values()]), strict=True):
                with writing(self.file(picture)):
                    write_whole(self.file(picture), save({"rows": rows.contiguous().cpu()}), durable=False)
        return [OnDisk(self, tuple(pictures)) for pictures in samples]

    def keep_only(self, pictures: Collection[str] | None = None) -> None:
        """Remove features of other towers, and what killed processes were writing. pictures: remove those of others."""
        for file in self._folder.iterdir():
            tower, _, picture = file.stem.partition("-")
            if tower != self._tower or (pictures is not None and picture not in pictures):
                file.unlink()

    def _is_stored(self, picture: str) -> bool:
        try:
            with safe_open(self.file(picture), "pt"):
                return True
        except (FileNotFoundError, SafetensorError):  # a truncated file is written again
            return False
