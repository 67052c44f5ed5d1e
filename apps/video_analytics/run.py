"""Many sources at once, each with its result files."""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from apps.opencv import STDERR
from apps.video_analytics.annotate import AnnotatedVideo
from apps.video_analytics.answers import ChunkResult, analyse
from apps.video_analytics.sources import Source
from apps.writing import writing
from vlora.client import Client, wait_for_server
from vlora.errors import BadConfig, VLoraError

COLUMNS = ("source", "index", "start_s", "time", "label", "confidence", "latency_s", "problem")


def run(
    client: Client,
    sources: Sequence[Source],
    adapter: str,
    head: str,
    *,
    out: Path | None = None,
    max_latency_s: float | None = None,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
    tell: Callable[[ChunkResult], None] = lambda result: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, int]:
    """Analyse all sources side by side until they end or `stop` is set; the number of answers by source.

    wait_s: how long a server or a camera that is not there at the start is waited for; one that goes away later is, in
    any case.
    out: a folder for NAME.jsonl, NAME.csv and NAME.webm of each source, complete up to the last answer whenever this
    ends; such files of an earlier run are replaced. tell is called with each result, from one thread at a time; say
    with what goes wrong and mends itself.

    Raises BadConfig when the folder cannot be made, and, after all sources have ended, the first error that ended one:
    a source that fails, or whose files cannot be written, does not end the others.
    """
    stop = stop or threading.Event()
    lock = threading.Lock()

    def heard(text: str) -> None:
        with STDERR:  # where `say` most often writes, and a source that opens its video writes nothing
            say(text)

    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadConfig(f"cannot make the folder {str(out)!r}: {error.strerror}") from error

    wait_for_server(client, wait_s, stop, heard)

    def one(source: Source) -> int:
        num_answers = 0
        video = None if out is None else AnnotatedVideo(out / f"{source.name}.webm")
        try:
            rows = None if out is None else ResultRows(out / source.name)
            for chunk, result in analyse(
                client,
                source,
                adapter,
                head,
                max_latency_s=max_latency_s,
                stop=stop,
                shown=out is not None,
                say=heard,
                wait_s=wait_s,
            ):
                num_answers += result.answer is not None
                if rows is not None and video is not None:
                    rows.add(result)
                    video.add(chunk, result)
                with lock:
                    tell(result)
        except VLoraError as error:
            if len(sources) > 1:
                heard(f"{source.name} ended: {error}")
            raise
        finally:
            if video is not None:
                video.close()
        return num_answers

    with ThreadPoolExecutor(len(sources), thread_name_prefix="source") as threads:
        futures = {source.name: threads.submit(one, source) for source in sources}
    return {name: future.result() for name, future in futures.items()}


class ResultRows:
    """NAME.jsonl and NAME.csv. Both are on the disk with every result, whatever becomes of the process.

    Raises BadConfig where they cannot be written.
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
    """A spreadsheet takes text that begins so for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
