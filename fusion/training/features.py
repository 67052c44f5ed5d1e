"""Image features of the frozen vision tower, cached on disk by the content of tower and pictures, read on demand."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from heads.storage import write_tensors
from vlora.run_folder import whole, writing


class InMemory(NamedTuple):
    """Features of all pictures of a sample, [image tokens, hidden * (1 + deepstack levels)]."""

    held: torch.Tensor

    def rows(self) -> torch.Tensor:
        return self.held


class OnDisk(NamedTuple):
    """Rows first to last of a file, which is mapped only while they are read; only the path is kept."""

    file: Path
    first: int
    last: int

    def rows(self) -> torch.Tensor:
        with safe_open(self.file, "pt") as stored:
            rows: torch.Tensor = stored.get_slice("rows")[self.first : self.last]
        return rows


Features = InMemory | OnDisk


class FeatureCache:
    """Features of groups of samples. tower: identifies the weights and the device that produce them."""

    def __init__(self, folder: Path, tower: str) -> None:
        self._folder = folder
        self._tower = tower
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, samples: Sequence[Sequence[str]]) -> list[OnDisk] | None:
        """Features of each sample, given as its pictures' content hashes; None unless the whole group is stored."""
        file = self._file(samples)
        try:
            with safe_open(file, "pt") as stored:
                counts: list[int] = stored.get_tensor("counts").tolist()
        except (FileNotFoundError, SafetensorError):  # a truncated file is written again
            return None
        ends = [0, *itertools.accumulate(counts)]
        pictures = [0, *itertools.accumulate(map(len, samples))]
        return [OnDisk(file, ends[first], ends[last]) for first, last in itertools.pairwise(pictures)]

    def put(self, samples: Sequence[Sequence[str]], rows: Sequence[torch.Tensor]) -> None:
        """Store features. rows: those of each picture of each sample, in order."""
        file = self._file(samples)
        counts = torch.tensor([len(one) for one in rows])
        with writing(file), whole(file, durable=False) as part:
            write_tensors({"rows": torch.cat(list(rows)).cpu(), "counts": counts}, part)

    def _file(self, samples: Sequence[Sequence[str]]) -> Path:
        key = hashlib.sha256(" ".join((self._tower, *itertools.chain(*samples))).encode()).hexdigest()
        return self._folder / f"{key}.safetensors"
