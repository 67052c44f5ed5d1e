"""Analyses sources concurrently: each is read once for all that is asked about it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from apps.video_analytics.answers import ChunkResult, answer
from apps.video_analytics.asked import Asked, Group, find_groups
from apps.video_analytics.result_files import ResultFiles
from apps.video_analytics.source_reader import SourceReader
from apps.video_analytics.sources import Source
from vlora.client import Client, wait_for_server
from vlora.errors import VLoraError
from vlora.opencv import STDERR
from vlora.run_folder import writing


@dataclasses.dataclass(frozen=True)
class Job:
    """One source, and what is asked about it.

    Attributes:
        find_groups: called once when the source starts. Raises VLoraError.
        max_latency_s: bound on each answer.
        own_names: name files and counts by the source alone if only one head or question is asked.
        files: opens the files of each head and question; without a path, none are written.
    """

    source: Source
    find_groups: Callable[[], list[Group]]
    max_latency_s: float | None = None
    own_names: bool = True
    files: Callable[[Asked, Path | None], ResultFiles] = lambda asked, base: ResultFiles(base)


class Analysis:
    """A run over all sources. The arguments are those of `run`. Makes the folder, and waits for the server.

    Raises:
        BadConfig: the folder cannot be made.
        Disconnected: no server is ready in time.
    """

    def __init__(
        self,
        client: Client,
        out: Path | None,
        *,
        wait_s: float,
        stop: threading.Event | None,
        on_result: Callable[[ChunkResult], None],
        say: Callable[[str], None],
    ) -> None:
        self.client, self.out = client, out
        self._wait_s, self._stop = wait_s, stop or threading.Event()
        self._on_result, self._say = on_result, say
        self._lock = threading.Lock()
        if out is not None:
            with writing(out):
                out.mkdir(parents=True, exist_ok=True)
        wait_for_server(client, wait_s, self._stop, self.print_line)

    def print_line(self, text: str) -> None:
        """Report a temporary problem, from any thread."""
        with STDERR:  # `say` often prints to stderr, which is redirected while a source opens its video
            self._say(text)

    def run(self, jobs: Sequence[Job]) -> dict[str, int]:
        """Analyse all sources until they end or `stop` is set.

        Returns:
            The number of answers by name.

        Raises:
            Exception: after all sources have ended, the first error that ended one; a VLoraError, or an internal one.
        """
        with ThreadPoolExecutor(len(jobs), thread_name_prefix="source") as threads:
            futures = [threads.submit(self._analyse, job, reports_end=len(jobs) > 1) for job in jobs]
        return {name: count for future in futures for name, count in future.result().items()}

    def _analyse(self, job: Job, *, reports_end: bool) -> dict[str, int]:
        """Analyse a source with every head and question. reports_end: print the error that ends it."""
        try:
            return self._answer_all(job)
        except Exception as error:
            if reports_end:
                self.print_line(f"{job.source.name} ended: {_cause(error)}")
            raise

    def _answer_all(self, job: Job) -> dict[str, int]:
        groups, source = job.find_groups(), job.source
        shapes = [group.shape for group in groups]
        reader = SourceReader(
            source, shapes, stop=self._stop, shown=self.out is not None, say=self.print_line, wait_s=self._wait_s
        )
        alone = len(groups) == len(groups[0].asked) == 1
        with ThreadPoolExecutor(len(groups), thread_name_prefix=source.name) as threads:
            futures = [
                threads.submit(self._answer, job, reader, place, group, alone) for place, group in enumerate(groups)
            ]
        return {name: count for future in futures for name, count in future.result().items()}

    def _answer(self, job: Job, reader: SourceReader, place: int, group: Group, alone: bool) -> dict[str, int]:
        """Answer the clips of a group and record the results. Returns the number of answers by name."""
        names = [
            job.source.name if alone and job.own_names else f"{job.source.name}.{asked.name}" for asked in group.asked
        ]
        counts = dict.fromkeys(names, 0)
        with contextlib.ExitStack() as scope:
            scope.callback(reader.leave, place)
            try:
                bases = [None if self.out is None else self.out / name for name in names]
                files = [
                    scope.enter_context(job.files(asked, base)) for asked, base in zip(group.asked, bases, strict=True)
                ]
                for clip, results in answer(
                    self.client,
                    job.source,
                    group,
                    reader,
                    place,
                    max_latency_s=job.max_latency_s,
                    stop=self._stop,
                    say=self.print_line,
                ):
                    for name, result in zip(names, results, strict=True):
                        counts[name] += result.problem is None
                    recorded = [each.add(clip, result) for each, result in zip(files, results, strict=True)]
                    with self._lock:
                        for result in recorded:
                            self._on_result(result)
            except Exception as error:
                # The other groups continue, of a camera for days. The end of the whole source is reported once, not for
                # each group.
                if not alone and error is not reader.error:
                    self.print_line(f"{', '.join(names)} ended: {_cause(error)}")
                raise
        return counts


def _cause(error: Exception) -> str:
    """An error in one line; its traceback is raised when all sources have ended."""
    if isinstance(error, VLoraError):
        return str(error)
    return f"internal error ({type(error).__name__}: {' '.join(str(error).split())})"


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
        adapter, heads, questions, max_tokens, fps: see `find_groups`.
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
    analysis = Analysis(client, out, wait_s=wait_s, stop=stop, on_result=on_result, say=say)
    groups = functools.partial(
        find_groups,
        client,
        (adapter,) if isinstance(adapter, str) else tuple(adapter),
        (heads,) if isinstance(heads, str) else tuple(heads),
        tuple(questions),
        max_tokens,
        fps,
    )
    return analysis.run([Job(source, groups, max_latency_s) for source in sources])
