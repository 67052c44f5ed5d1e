"""The files of one training on live records: its plan, questions and pictures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from vlora.learning.live_store import Labelled
from vlora.training.plan import TrainingSettings
from vlora.training.records import FILE_NAME, Record

_PREFIX, _PLAN, _OUT = "training-", "plan.yaml", "out"


class Attempt:
    """A training in a folder of its own. number: counts them."""

    def __init__(self, folder: Path, adapter: str, number: int) -> None:
        """folder: Of the learning adapter."""
        self.number = number
        self.name = f"{adapter}.training-{number}"
        self._folder = folder / f"{_PREFIX}{number}"

    @property
    def plan(self) -> Path:
        """Exists once all other files do."""
        return self._folder / _PLAN

    @property
    def adapter_folder(self) -> Path:
        return self._folder / _OUT / self.name / "adapter"

    def write(
        self,
        settings: TrainingSettings,
        start: Path | None,
        live: Sequence[Labelled],
        data: Iterable[Record],
        image_of: Callable[[int], bytes | None],
    ) -> int:
        """Write the files. Returns the number of records to train on.

        Args:
            settings: Of the training.
            start: The adapter to begin from.
            live: Corrected answers. Those that are held out become the validation part.
            data: The operator's records.
            image_of: Returns a live record's picture by its number.

        Raises:
            OSError: They cannot be written.
        """
        self.remove()
        (self._folder / "images").mkdir(parents=True)
        num_records = 0
        with (self._folder / FILE_NAME).open("w", encoding="utf-8") as file:
            for one in live:
                row: dict[str, Any] = {"question": one.question, "answer": one.label}
                row["split"] = "validation" if one.held_out else "train"
                if (image := image_of(one.number)) is not None:
                    row["image"] = f"images/{one.number}"
                    (self._folder / row["image"]).write_bytes(image)
                file.write(json.dumps(row) + "\n")
                num_records += not one.held_out
            for record in data:
                row = {"question": record.question, "answer": record.answer, "split": "train"}
                if record.image is not None:
                    row["image"] = os.path.abspath(record.image)
                file.write(json.dumps(row) + "\n")
                num_records += 1
        entry = settings.model_dump(mode="json") | {"name": self.name, "data": "."}
        entry |= {"register_adapter": False, "bad_records": "skip"}
        if start is not None:
            entry["start"] = str(start)
        part = self.plan.with_suffix(".part")
        part.write_text(yaml.safe_dump({"folder": _OUT, "trainings": [entry]}))
        part.rename(self.plan)
        return num_records

    def remove(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def remove_others(folder: Path, kept: Attempt | None) -> None:
    """Remove the files of ended trainings of a learning adapter that a process left when it died."""
    for found in folder.glob(f"{_PREFIX}*"):
        if kept is None or found.name != f"{_PREFIX}{kept.number}":
            shutil.rmtree(found, ignore_errors=True)
