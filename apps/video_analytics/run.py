"""Many sources at once, each with its result files."""

from __future__ import annotations

import csv
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from apps.opencv import STDERR
from apps.video_analytics.annotate import AnnotatedVideo
from apps.video_analytics.answers import ChunkResult, answer, find_head
from apps.video_analytics.reading import Reading
from apps.video_analytics.sampling import ClipShape
from apps.video_analytics.sources import Source, told_apart
from apps.writing import writing
from vlora.client import Client, wait_for_server
from vlora.errors import BadConfig, VLoraError

COLUMNS = ("source", "head", "index", "start_s", "time", "label", "confidence", "latency_s", "problem")


def run(
    client: Client,
    sources: Sequence[Source],
    adapter: str,
    heads: str | Sequence[str],
    *,
    fps: float | None = None,
    out: Path | None = None,
    max_latency_s: float | None = None,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
    tell: Callable[[ChunkResult], None] = lambda result: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, int]:
    """Analyse all sources concurrently until they end or `stop` is set.

    Returns the number of answers by source, and by SOURCE.HEAD with several heads, which share one reading of the
    source.

    Args:
        fps: frames per second of each head's clips; None makes one clip per second.
        wait_s: how long to wait for a server or a camera that is not available at startup; one lost later is always
            awaited.
        out: a folder for NAME.jsonl, NAME.csv and NAME.webm of each source (NAME.HEAD.* with several heads), complete
            up to the last answer at any exit; existing files are replaced.
        tell: called with each result, from one thread at a time.
        say: called with temporary problems.

    Raises:
        BadConfig: the folder cannot be made.
        VLoraError: after all sources have ended, the first error that ended one: a failed source, or a failure
            to write its files, does not end the others.
    """
    stop = stop or threading.Event()
    lock = threading.Lock()

    def heard(text: str) -> None:
        with STDERR:  # `say` often prints to stderr, which is redirected while a source opens its video
            say(text)

    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadConfig(f"cannot make the folder {str(out)!r}: {error.strerror}") from error

    wait_for_server(client, wait_s, stop, heard)

    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    suffixes, shown = _suffixes(heads), out is not None

    def one(source: Source) -> dict[str, int]:
        shapes = [ClipShape(find_head(client, adapter, head).num_frames, fps) for head in heads]
        reading = Reading(source, shapes, stop=stop, shown=shown, say=heard, wait_s=wait_s)
        with ThreadPoolExecutor(len(heads), thread_name_prefix=source.name) as threads:
            futures = {
                f"{source.name}{suffix}": threads.submit(of_head, source, reading, place)
                for place, suffix in enumerate(suffixes)
            }
        return {name: future.result() for name, future in futures.items()}

    def of_head(source: Source, reading: Reading, place: int) -> int:
        num_answers = 0
        name = f"{source.name}{suffixes[place]}"
        video = None if out is None else AnnotatedVideo(out / f"{name}.webm")
        try:
            rows = None if out is None else ResultRows(out / name)
            for clip, result in answer(
                client,
                source,
                adapter,
                heads[place],
                reading,
                place,
                max_latency_s=max_latency_s,
                stop=stop,
                say=heard,
            ):
                num_answers += result.answer is not None
                if rows is not None and video is not None:
                    rows.add(result)
                    video.add(clip, result)
                with lock:
                    tell(result)
        except VLoraError as error:
            # The other heads continue, of a camera for days. The end of the whole source is reported once, not for each
            # head.
            if len(heads) > 1 and error is not reading.error:
                heard(f"{name} ended: {error}")
            raise
        finally:
            reading.leave(place)
            if video is not None:
                video.close()
        return num_answers

    def told(source: Source) -> dict[str, int]:
        try:
            return one(source)
        except VLoraError as error:
            if len(sources) > 1:
                heard(f"{source.name} ended: {error}")
            raise

    with ThreadPoolExecutor(len(sources), thread_name_prefix="source") as threads:
        futures = [threads.submit(told, source) for source in sources]
    return {name: count for future in futures for name, count in future.result().items()}


def _suffixes(heads: Sequence[str]) -> list[str]:
    """Suffix of each head in file names: empty with only one head."""
    if len(heads) == 1:
        return [""]
    return [f".{name}" for name in told_apart([re.sub(r"[^\w-]+", "-", head) for head in heads])]


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


def _cell(value: object) -> object:
    """Escape text that a spreadsheet would interpret as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
