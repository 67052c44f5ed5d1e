"""Many sources at once, each with its result files."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import msgspec

from apps.opencv import STDERR
from apps.video_analytics.annotate import AnnotatedVideo
from apps.video_analytics.answers import ChunkResult, answer
from apps.video_analytics.asked import Group, find_groups
from apps.video_analytics.sampling import Chunk, ClipShape
from apps.video_analytics.source_reader import SourceReader
from apps.video_analytics.sources import Source
from apps.writing import writing
from vlora.client import Client, wait_for_server
from vlora.errors import BadConfig, VLoraError

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


def run(
    client: Client,
    sources: Sequence[Source],
    adapter: str | Sequence[str],
    heads: str | Sequence[str],
    *,
    questions: Sequence[str] = (),
    max_tokens: int = 64,
    fps: float | None = None,
    out: Path | None = None,
    max_latency_s: float | None = None,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
    on_result: Callable[[ChunkResult], None] = lambda result: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, int]:
    """Analyse all sources concurrently until they end or `stop` is set.

    Returns the number of answers by source, and by SOURCE.NAME with several heads and questions, which share one
    reading of the source. Those about the same number of frames share one stream.

    Args:
        adapter, heads, questions, max_tokens: see `find_groups`.
        fps: frames per second of each head's clips; None makes one clip per second.
        wait_s: how long to wait for a server or a camera that is not available at startup; one lost later is always
            awaited.
        out: a folder for SOURCE.jsonl, SOURCE.csv and SOURCE.webm of each source (SOURCE.NAME.* with several heads or
            questions), complete up to the last answer at any exit; existing files are replaced.
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
        adapters=(adapter,) if isinstance(adapter, str) else tuple(adapter),
        heads=(heads,) if isinstance(heads, str) else tuple(heads),
        questions=tuple(questions),
        max_tokens=max_tokens,
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
    adapters: tuple[str, ...]
    heads: tuple[str, ...]
    questions: tuple[str, ...]
    max_tokens: int
    fps: float | None
    out: Path | None
    max_latency_s: float | None
    wait_s: float
    stop: threading.Event
    report_result: Callable[[ChunkResult], None]
    print_line: Callable[[str], None]

    def analyse(self, source: Source, *, reports_end: bool) -> dict[str, int]:
        """Analyse a source with every head and question. reports_end: print the error that ends it."""
        try:
            return self._analyse(source)
        except VLoraError as error:
            if reports_end:
                self.print_line(f"{source.name} ended: {error}")
            raise

    def _analyse(self, source: Source) -> dict[str, int]:
        groups = find_groups(self.client, self.adapters, self.heads, self.questions, self.max_tokens)
        shapes = [ClipShape(group.num_frames, self.fps) for group in groups]
        reader = SourceReader(
            source, shapes, stop=self.stop, shown=self.out is not None, say=self.print_line, wait_s=self.wait_s
        )
        alone = len(groups) == len(groups[0].asked) == 1
        with ThreadPoolExecutor(len(groups), thread_name_prefix=source.name) as threads:
            futures = [
                threads.submit(self._answer, source, reader, place, group, _names(source, group, alone=alone), alone)
                for place, group in enumerate(groups)
            ]
        return {name: count for future in futures for name, count in future.result().items()}

    def _answer(
        self, source: Source, reader: SourceReader, place: int, group: Group, names: list[str], alone: bool
    ) -> dict[str, int]:
        """Answer the clips of a group, and write its files. Returns the number of answers by name."""
        counts = dict.fromkeys(names, 0)
        with contextlib.ExitStack() as scope:
            scope.callback(reader.leave, place)
            try:
                files = [] if self.out is None else [scope.enter_context(_Files(self.out / name)) for name in names]
                for clip, results in answer(
                    self.client,
                    source,
                    group,
                    reader,
                    place,
                    max_latency_s=self.max_latency_s,
                    stop=self.stop,
                    say=self.print_line,
                ):
                    for name, result in zip(names, results, strict=True):
                        counts[name] += result.problem is None
                    for file, result in zip(files, results, strict=False):
                        file.add(clip, result)
                    for result in results:
                        self.report_result(result)
            except VLoraError as error:
                # The other groups continue, of a camera for days. The end of the whole source is reported once, not for
                # each group.
                if not alone and error is not reader.error:
                    self.print_line(f"{', '.join(names)} ended: {error}")
                raise
        return counts


def _names(source: Source, group: Group, *, alone: bool) -> list[str]:
    """Names of the group's files: the source's with only one head or question."""
    return [source.name if alone else f"{source.name}.{asked.name}" for asked in group.asked]


class _Files:
    """The files of one head or question of a source. The video is complete once closed."""

    def __init__(self, base: Path) -> None:
        self._video = AnnotatedVideo(Path(f"{base}.webm"))
        self._rows = ResultRows(base)

    def add(self, clip: Chunk, result: ChunkResult) -> None:
        self._rows.add(result)
        self._video.add(clip, result)

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


def _cell(value: object) -> object:
    """Escape text that a spreadsheet would interpret as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
