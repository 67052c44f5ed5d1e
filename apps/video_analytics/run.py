"""Many sources at once, each with its result files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from apps.video_analytics.analysis import Analysis, Job
from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.asked import find_groups
from apps.video_analytics.sources import Source
from vlora.client import Client, wait_for_server
from vlora.opencv import STDERR
from vlora.run_folder import writing


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
    analysis = prepare(client, out, wait_s=wait_s, stop=stop, on_result=on_result, say=say)
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


def prepare(
    client: Client,
    out: Path | None,
    *,
    wait_s: float,
    stop: threading.Event | None,
    on_result: Callable[[ChunkResult], None],
    say: Callable[[str], None],
) -> Analysis:
    """Make the folder, and wait for the server. The arguments are those of `run`.

    Raises:
        BadConfig: the folder cannot be made.
        Disconnected: no server is ready in time.
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
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
    wait_for_server(client, wait_s, stop, print_line)
    return Analysis(client, out, wait_s, stop, report_result, print_line)
