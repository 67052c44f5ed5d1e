"""Analyses sources concurrently: each is read once for all that is asked about it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from apps.video_analytics.answers import ChunkResult, answer
from apps.video_analytics.asked import Asked, Group
from apps.video_analytics.result_files import ResultFiles
from apps.video_analytics.sampling import Chunk
from apps.video_analytics.source_reader import SourceReader
from apps.video_analytics.sources import Source
from vlora.client import Client
from vlora.errors import VLoraError


class Recorder(Protocol):
    """Records the results of one head or question of a source."""

    def add(self, clip: Chunk, result: ChunkResult) -> ChunkResult:
        """Record a result; returns it with what was added to it."""
        ...


OpenRecorder = Callable[[Asked, Path | None], contextlib.AbstractContextManager[Recorder]]
"""Opens the recorder of what is asked, with the path of its result files without suffixes; None without files."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One source, and what is asked about it.

    Attributes:
        find_groups: called once when the source starts. Raises VLoraError.
        max_latency_s: bound on each answer.
        own_names: name files and counts by the source alone if only one head or question is asked.
        recorder: opens the recorder of each head and question.
    """

    source: Source
    find_groups: Callable[[], list[Group]]
    max_latency_s: float | None = None
    own_names: bool = True
    recorder: OpenRecorder = lambda asked, base: ResultFiles(base)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The parameters that all threads of a run share.

    Attributes:
        out: folder of the result files; None writes none.
        report_result: called with each result, from several threads.
        print_line: called with temporary problems, from several threads.
    """

    client: Client
    out: Path | None
    wait_s: float
    stop: threading.Event
    report_result: Callable[[ChunkResult], None]
    print_line: Callable[[str], None]

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
            source, shapes, stop=self.stop, shown=self.out is not None, say=self.print_line, wait_s=self.wait_s
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
                recorders = [
                    scope.enter_context(job.recorder(asked, base))
                    for asked, base in zip(group.asked, bases, strict=True)
                ]
                for clip, results in answer(
                    self.client,
                    job.source,
                    group,
                    reader,
                    place,
                    max_latency_s=job.max_latency_s,
                    stop=self.stop,
                    say=self.print_line,
                ):
                    for name, result in zip(names, results, strict=True):
                        counts[name] += result.problem is None
                    recorded = [each.add(clip, result) for each, result in zip(recorders, results, strict=True)]
                    for result in recorded:
                        self.report_result(result)
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
