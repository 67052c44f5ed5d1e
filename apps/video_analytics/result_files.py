"""The files that a head or a question of a source writes: answers, a table, the annotated video, tracks."""

from __future__ import annotations

import csv
from collections.abc import Sequence
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

    def __init__(self, base: Path, *, tracked: bool = False) -> None:
        """tracked: also write NAME.tracks.jsonl, a line for each frame, and NAME.tracks.csv, a line for each object.

        Raises:
            BadConfig: the files cannot be written.
        """
        self._video = AnnotatedVideo(Path(f"{base}.webm"))
        self._rows = ResultRows(base)
        self._tracks = TrackRows(base) if tracked else None

    def add(self, clip: Chunk, result: ChunkResult, frames: Sequence[TrackedFrame] = ()) -> None:
        """frames: the tracked objects in each picture of the clip."""
        self._rows.add(result)
        self._video.add(clip, result, frames)
        if self._tracks is not None:
            self._tracks.add_frames(frames)

    def add_tracks(self, tracks: Sequence[Track]) -> None:
        """Objects that are no longer followed."""
        if self._tracks is not None:
            self._tracks.add_tracks(tracks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._video.close()


class ResultRows:
    """NAME.jsonl and NAME.csv. Every result is flushed to the disk immediately, so that it survives the process.

    Raises BadConfig if they cannot be written.
    """

    def __init__(self, base: Path) -> None:
        self._jsonl, self._csv = Path(f"{base}.jsonl"), Path(f"{base}.csv")
        with writing(self._jsonl):
            self._jsonl.write_text("")
        with writing(self._csv):
            self._csv.write_text(",".join(COLUMNS) + "\r\n")

    def add(self, result: ChunkResult) -> None:
        with writing(self._jsonl), self._jsonl.open("ab") as lines:
            lines.write(msgspec.json.encode(result) + b"\n")
        with writing(self._csv), self._csv.open("a", encoding="utf-8", newline="") as table:
            csv.writer(table).writerow(_cell(getattr(result, column)) for column in COLUMNS)


class TrackRows:
    """NAME.tracks.jsonl and NAME.tracks.csv, as `ResultRows`."""

    def __init__(self, base: Path) -> None:
        self._jsonl, self._csv = Path(f"{base}.tracks.jsonl"), Path(f"{base}.tracks.csv")
        with writing(self._jsonl):
            self._jsonl.write_text("")
        with writing(self._csv):
            self._csv.write_text(",".join(TRACK_COLUMNS) + "\r\n")

    def add_frames(self, frames: Sequence[TrackedFrame]) -> None:
        with writing(self._jsonl), self._jsonl.open("ab") as lines:
            lines.write(b"".join(msgspec.json.encode(frame) + b"\n" for frame in frames))

    def add_tracks(self, tracks: Sequence[Track]) -> None:
        with writing(self._csv), self._csv.open("a", encoding="utf-8", newline="") as table:
            csv.writer(table).writerows([_cell(getattr(each, name)) for name in TRACK_COLUMNS] for each in tracks)


def _cell(value: object) -> object:
    """Escape text that a spreadsheet would interpret as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
