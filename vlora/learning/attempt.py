"""The files of one training on live records: its plan, questions and pictures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from vlora.learning.sample_store import Labelled
from vlora.run_folder import write_whole
from vlora.training.plan import TrainingSettings
from vlora.training.records import FILE_NAME, Record

_PREFIX, _PLAN, _OUT = "training-", "plan.yaml", "out"
PART = 32  # records with pictures that are written at a time


class Attempt:
    """A training in a folder of its own. number: counts them."""

    def __init__(self, folder: Path, adapter: str, number: int) -> None:
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
        data: Sequence[Record],
        image_of: Callable[[int], bytes | None],
    ) -> Iterator[None]:
        """Write the files. Yields between parts, none of which takes long, so that others can be served.

        Args:
            live: Corrected answers. Those that are held out become the validation part.
            data: The operator's records.
            image_of: Returns a live record's picture by its number. Raises LookupError if the record was dropped.

        Raises:
            OSError: A part cannot be written.
        """
        self.remove()
        (self._folder / "images").mkdir(parents=True)
        for first in range(0, len(live), PART):
            self._add(self._live_rows(live[first : first + PART], image_of))
            yield
        for first in range(0, len(data), 100 * PART):
            self._add(map(_row_of, data[first : first + 100 * PART]))
            yield
        self._write_plan(settings, start)

    def _add(self, rows: Iterable[dict[str, Any]]) -> None:
        with (self._folder / FILE_NAME).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def _live_rows(
        self, records: Iterable[Labelled], image_of: Callable[[int], bytes | None]
    ) -> Iterator[dict[str, Any]]:
        for one in records:
            row: dict[str, Any] = {"question": one.question, "answer": one.label}
            row["split"] = "validation" if one.held_out else "train"
            try:
                image = image_of(one.number)
            except LookupError:  # dropped meanwhile
                continue
            if image is not None:
                row["image"] = f"images/{one.number}"
                (self._folder / row["image"]).write_bytes(image)
            yield row

    def _write_plan(self, settings: TrainingSettings, start: Path | None) -> None:
        entry = settings.model_dump(mode="json") | {"name": self.name, "data": "."}
        entry |= {"register_adapter": False, "bad_records": "skip"}
        if start is not None:
            entry["start"] = str(start)
        write_whole(self.plan, yaml.safe_dump({"folder": _OUT, "trainings": [entry]}).encode(), durable=False)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _row_of(record: Record) -> dict[str, Any]:
    row = {"question": record.question, "answer": record.answer, "split": "train"}
    if record.image is not None:
        row["image"] = os.path.abspath(record.image)
    return row


def remove_others(folder: Path, kept: Attempt | None) -> None:
    """Remove the files of ended trainings of a learning adapter that a process left when it died."""
    for found in folder.glob(f"{_PREFIX}*"):
        if kept is None or found.name != f"{_PREFIX}{kept.number}":
            shutil.rmtree(found, ignore_errors=True)
