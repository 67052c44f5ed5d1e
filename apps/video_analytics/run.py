"""Many sources at once, each with its result files."""

from __future__ import annotations

import csv
import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from apps.opencv import STDERR
from apps.video_analytics.annotate import AnnotatedVideo
from apps.video_analytics.answers import ChunkResult, answer, find_head
from apps.video_analytics.sampling import ClipShape
from apps.video_analytics.source_reader import SourceReader
from apps.video_analytics.sources import Source, unique_names
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
    on_result: Callable[[ChunkResult], None] = lambda result: None,
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
        on_result: called with each result, from one thread at a time.
        say: called with temporary problems.

    Raises:
        BadConfig: the folder cannot be made.
        VLoraError: after all sources have ended, the first error that ended one: a failed source, or a failure
            to write its files, does not end the others.
    """
    stop = stop or threading.Event()
    lock = threading.Lock()

    def print_line(text: str) -> None:
        with STDERR:  # `say` often prints to stderr, which is redirected while a source opens its video
            say(text)

    def report_result(result: ChunkResult) -> None:
        with lock:
            on_result(result)

    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadConfig(f"cannot make the folder {str(out)!r}: {error.strerror}") from error
    wait_for_server(client, wait_s, stop, print_line)
    analysis = _Analysis(
        client=client,
        adapter=adapter,
        heads=(heads,) if isinstance(heads, str) else tuple(heads),
        fps=fps,
        out=out,
        max_latency_s=max_latency_s,
        wait_s=wait_s,
        stop=stop,
        report_result=report_result,
        print_line=print_line,
    )
    with ThreadPoolExecutor(len(sources), thread_name_prefix="source") as threads:
        futures = [threads.submit(analysis.analyse, source, reports_end=len(sources) > 1) for source in sources]
    return {name: count for future in futures for name, count in future.result().items()}


@dataclasses.dataclass(frozen=True)
class _Analysis:
    """The parameters of `run`, which all of its threads share."""

    client: Client
    adapter: str
    heads: tuple[str, ...]
    fps: float | None
    out: Path | None
    max_latency_s: float | None
    wait_s: float
    stop: threading.Event
    report_result: Callable[[ChunkResult], None]
    print_line: Callable[[str], None]

    def analyse(self, source: Source, *, reports_end: bool) -> dict[str, int]:
        """Analyse a source with every head. reports_end: print the error that ends it."""
        try:
            return self._analyse(source)
        except VLoraError as error:
            if reports_end:
                self.print_line(f"{source.name} ended: {error}")
            raise

    def _analyse(self, source: Source) -> dict[str, int]:
        shapes = [ClipShape(find_head(self.client, self.adapter, head).num_frames, self.fps) for head in self.heads]
        reader = SourceReader(
            source, shapes, stop=self.stop, shown=self.out is not None, say=self.print_line, wait_s=self.wait_s
        )
        with ThreadPoolExecutor(len(self.heads), thread_name_prefix=source.name) as threads:
            futures = {
                (name := f"{source.name}{suffix}"): threads.submit(self._answer, source, reader, place, name)
                for place, suffix in enumerate(_suffixes(self.heads))
            }
        return {name: future.result() for name, future in futures.items()}

    def _answer(self, source: Source, reader: SourceReader, place: int, name: str) -> int:
        """Answer the clips of the head at an index, and write its files. Returns the number of answers."""
        num_answers = 0
        video = None if self.out is None else AnnotatedVideo(self.out / f"{name}.webm")
        try:
            rows = None if self.out is None else ResultRows(self.out / name)
            for clip, result in answer(
                self.client,
                source,
                self.adapter,
                self.heads[place],
                reader,
                place,
                max_latency_s=self.max_latency_s,
                stop=self.stop,
                say=self.print_line,
            ):
                num_answers += result.answer is not None
                if rows is not None and video is not None:
                    rows.add(result)
                    video.add(clip, result)
                self.report_result(result)
        except VLoraError as error:
            # The other heads continue, of a camera for days. The end of the whole source is reported once, not for each
            # head.
            if len(self.heads) > 1 and error is not reader.error:
                self.print_line(f"{name} ended: {error}")
            raise
        finally:
            reader.leave(place)
            if video is not None:
                video.close()
        return num_answers


def _suffixes(heads: Sequence[str]) -> list[str]:
    """Suffix of each head in file names: empty with only one head."""
    if len(heads) == 1:
        return [""]
    return [f".{name}" for name in unique_names([re.sub(r"[^\w-]+", "-", head) for head in heads])]


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
