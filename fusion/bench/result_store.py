"""Results of a benchmark on disk, from which a stopped run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ORIGIN = ("commit", "machine", "gpu", "versions")


class ResultStore:
    """JSON objects by name in a folder, each with the commit and the machine that it was measured on.

    Trainings take hours, so a later commit or another machine continues from their results; a report states the
    `origins`.

    Args:
        folder: The folder; made when the first result is stored.
        environment: Of results that are measured now: `vlora.bench.report.environment()`, or empty.
    """

    def __init__(self, folder: Path, environment: Mapping[str, Any]) -> None:
        self.folder = folder
        self._origin = {name: environment.get(name) for name in _ORIGIN}

    def has(self, name: str) -> bool:
        return self._file(name).exists()

    def read(self, name: str) -> dict[str, Any]:
        """A stored result, with its `origin`; that of a result of an earlier version is unknown."""
        return {"origin": dict.fromkeys(_ORIGIN), **json.loads(self._file(name).read_text())}

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._file(name).with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**result, "origin": self._origin}) + "\n")
        unfinished.replace(self._file(name))

    def once(self, name: str, measure: Callable[[], Mapping[str, Any]], *, here: bool = False) -> dict[str, Any]:
        """A stored result, measured first if there is none.

        Args:
            name: Of the result.
            measure: Measures it.
            here: Measure again if the stored one is of another commit or machine, as for latencies.
        """
        if not self.has(name) or (here and self.read(name)["origin"] != self._origin):
            self.write(name, measure())
        return self.read(name)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def origins(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The commits and machines of stored results, with the names of each one's results."""
    found: list[dict[str, Any]] = []
    for name, result in results.items():
        origin = result["origin"]
        same = next((each for each in found if all(each[key] == origin[key] for key in _ORIGIN)), None)
        if same is None:
            found.append({**origin, "results": [name]})
        else:
            same["results"].append(name)
    return found
