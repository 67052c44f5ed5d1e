"""The files that a head or a question of a source writes: answers, a table, the annotated video, tracks."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from apps.video_analytics.annotate import AnnotatedVideo
from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.sampling import Chunk
from vlora.run_folder import writing

if TYPE_CHECKING:
    from apps.video_analytics.tracking import Track, TrackedFrame

COLUMNS = (
    "source",
    "head",
    "index",
    "start_s",
    "time",
    "label",
    "confidence",
    "latency_s",
    "problem",
    "adapter",
    "question",
)
TRACK_COLUMNS = ("id", "label", "first_s", "last_s", "frames", "detections")


class ResultFiles:
    """The files of one head or question of a source. The video is complete once closed."""

    def __init__(self, base: Path | None, *, tracked: bool = False) -> None:
        """base: without suffixes; None writes no files. tracked: also write NAME.tracks.jsonl, a line for each frame,
        and NAME.tracks.csv, a line for each object. Raises BadConfig if they cannot be written.
        """
        self._video = None if base is None else AnnotatedVideo(Path(f"{base}.webm"))
        self._rows = None if base is None else Rows(f"{base}", COLUMNS)
        self._tracks = Rows(f"{base}.tracks", TRACK_COLUMNS) if tracked and base is not None else None

    def add(self, clip: Chunk, result: ChunkResult, frames: Sequence[TrackedFrame] = ()) -> ChunkResult:
        """frames: the tracked objects in each picture of the clip."""
        if self._rows is not None and self._video is not None:
            self._rows.add_lines([result])
            self._rows.add_rows([result])
            self._video.add(clip, result, frames)
        if self._tracks is not None:
            self._tracks.add_lines(frames)
        return result

    def add_tracks(self, tracks: Sequence[Track]) -> None:
        """Objects that are no longer followed."""
        if self._tracks is not None:
            self._tracks.add_rows(tracks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._video is not None:
            self._video.close()


class Rows:
    """BASE.jsonl, and BASE.csv with these columns. Every result is flushed to the disk immediately, so that it survives
    the process. Raises BadConfig if they cannot be written.
    """

    def __init__(self, base: str, columns: Sequence[str]) -> None:
        self._jsonl, self._csv, self._columns = Path(f"{base}.jsonl"), Path(f"{base}.csv"), columns
        for path, content in ((self._jsonl, ""), (self._csv, ",".join(columns) + "\r\n")):
            with writing(path):
                path.write_text(content, newline="")

    def add_lines(self, values: Iterable[object]) -> None:
        with writing(self._jsonl), self._jsonl.open("ab") as lines:
            lines.write(b"".join(msgspec.json.encode(value) + b"\n" for value in values))

    def add_rows(self, values: Sequence[object]) -> None:
        with writing(self._csv), self._csv.open("a", encoding="utf-8", newline="") as table:
            csv.writer(table).writerows([_cell(getattr(value, name)) for name in self._columns] for value in values)


def _cell(value: object) -> object:
    """Escape text that a spreadsheet would interpret as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
