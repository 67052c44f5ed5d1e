"""Sends a source's clips through a server stream and yields the results in order, across broken connections."""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from apps.video_analytics.sampling import Chunk, ClipShape
from apps.video_analytics.source_reader import SourceReader
from apps.video_analytics.sources import Source
from vlora.client import Client, FrameStream, HeadResult
from vlora.errors import Disconnected, EngineDead, OverCapacity, UnknownAdapter, UnknownHead, UnknownStream
from vlora.types import HeadSummary, is_composed

CHUNKS_IN_FLIGHT = 4  # of a stream that the server answers concurrently

_MOST_UNREAD = 12  # chunks sent without a taken result: they are buffered here, and finished after Ctrl-C
_ROOM_S = 0.5
_PATIENCE_S = 120.0  # how long to wait for an unreachable server
PAUSE_S = 1.0

# Errors that are temporary after a successful start: the head existed then, and will exist again once it is reloaded.
_RETRIED_ERRORS = (Disconnected, EngineDead, UnknownStream, UnknownAdapter, UnknownHead, OverCapacity)


_Take = Callable[[threading.Event], Chunk | None]


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a chunk. latency_s: on the server, from its arrival to its answer.

    answer: None if the chunk was dropped or failed; problem is then the cause. time: of the answer, UTC.
    """

    source: str
    head: str
    index: int
    start_s: float
    time: datetime.datetime
    latency_s: float
    label: str = ""
    confidence: float = 0.0
    answer: HeadResult | None = None
    problem: str | None = None


def analyse(
    client: Client,
    source: Source,
    adapter: str,
    head: str,
    *,
    fps: float | None = None,
    max_latency_s: float | None = None,
    stop: threading.Event | None = None,
    shown: bool = False,
    say: Callable[[str], None] = lambda text: None,
    wait_s: float = 0.0,
    patience_s: float = _PATIENCE_S,
) -> Iterator[tuple[Chunk, ChunkResult]]:
    """Query one head about every clip of a source, reading it with `read_clips`; see `answer`.

    Args:
        fps: frames per second of the head's clips; None makes one clip per second.
        shown, say, wait_s: see `read_clips`.

    Raises:
        BadImage: the source cannot be read.
        UnknownAdapter, UnknownHead: the server does not have them.
    """
    stop = stop or threading.Event()
    shape = ClipShape(find_head(client, adapter, head).num_frames, fps)
    reader = SourceReader(source, [shape], stop=stop, shown=shown, say=say, wait_s=wait_s)
    yield from answer(
        client,
        source,
        adapter,
        head,
        reader,
        0,
        max_latency_s=max_latency_s,
        stop=stop,
        say=say,
        patience_s=patience_s,
    )


def answer(
    client: Client,
    source: Source,
    adapter: str,
    head: str,
    reader: SourceReader,
    place: int,
    *,
    max_latency_s: float | None = None,
    stop: threading.Event,
    say: Callable[[str], None] = lambda text: None,
    patience_s: float = _PATIENCE_S,
) -> Iterator[tuple[Chunk, ChunkResult]]:
    """Query a head about every clip read for it; yields each clip with its result, in order.

    If a camera is faster than the server, newer clips replace older ones; no clip of a file is dropped. When `stop` is
    set, no more clips are read, and clips already sent are still answered. If the server is unreachable or full, or has
    lost the head, its return is awaited (for a file up to `patience_s`), and clips without an answer are sent again;
    `say` is called once, and again when the reason changes.

    Args:
        reading: of the source. place: of the head in it; the head leaves it at the end.

    Raises:
        BadImage: the source cannot be read.
        VLoraError: an error of the client.
    """
    unanswered: deque[Chunk] = deque()
    lost_at: float | None = None
    reported = ""
    take = functools.partial(reader.take, place)
    try:
        while True:
            try:
                with client.open_stream(
                    adapter=adapter, head=head, max_latency_s=max_latency_s, drop="newest" if source.live else "none"
                ) as stream:
                    for pair in _answer_clips(stream, take, unanswered, source, head):
                        lost_at, reported = None, ""
                        yield pair
                    return
            except _RETRIED_ERRORS as error:
                lost_at = lost_at or time.monotonic()
                if stop.is_set() or (not source.live and time.monotonic() - lost_at > patience_s):
                    raise
                if reported != (reported := str(error)):
                    say(f"{source.name}: {error}; retrying")
                stop.wait(PAUSE_S)
    finally:
        reader.leave(place)


def find_head(client: Client, adapter: str, head: str) -> HeadSummary:
    """The server's description of a head. Raises UnknownAdapter, UnknownHead with the known names."""
    adapters = {status.name: status for status in client.adapters()}
    if is_composed(adapter):
        raise UnknownAdapter(f"adapter {adapter!r} is a composition; a task head belongs to one adapter: name that one")
    if adapter not in adapters:
        raise UnknownAdapter(f"no adapter named {adapter!r}; registered: {', '.join(adapters) or 'none'}")
    heads = {summary.name: summary for summary in adapters[adapter].heads}
    if head not in heads:
        owners = [name for name, status in adapters.items() if any(summary.name == head for summary in status.heads)]
        hint = f"; head {head!r} belongs to adapter {' and '.join(map(repr, owners))}" if owners else ""
        raise UnknownHead(f"adapter {adapter!r} has no head {head!r}; its heads: {', '.join(heads) or 'none'}{hint}")
    return heads[head]


def _answer_clips(
    stream: FrameStream, take: _Take, unanswered: deque[Chunk], source: Source, head: str
) -> Iterator[tuple[Chunk, ChunkResult]]:
    """The clips and results of a source through one stream. Chunks move through `unanswered`: its initial chunks are
    sent first, and its final chunks have no answer.
    """
    failed: list[Exception] = []
    again = tuple(unanswered)
    gone = threading.Event()
    room = threading.Semaphore(_MOST_UNREAD - len(again))

    def send() -> None:
        try:
            for chunk in again:
                stream.send(*chunk.frames)
            for chunk in iter(functools.partial(_take, take, gone, room, failed), None):
                unanswered.append(chunk)
                stream.send(*chunk.frames)
            if not gone.is_set():
                stream.end()
        except Exception as error:
            failed.append(error)
            stream.close()  # notifies the reader of the results

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        for result in stream:
            error = None if result.error is None else result.error.to_exception()
            if isinstance(error, _RETRIED_ERRORS):
                raise error
            chunk = unanswered.popleft()
            room.release()
            yield (
                chunk,
                ChunkResult(
                    source=source.name,
                    head=head,
                    index=chunk.index,
                    start_s=chunk.start_s,
                    time=datetime.datetime.now(datetime.UTC),
                    latency_s=result.latency_s,
                    label="" if result.answer is None else result.answer.label,
                    confidence=0.0 if result.answer is None else result.answer.confidence,
                    answer=result.answer,
                    problem=result.dropped or (None if result.error is None else result.error.message),
                ),
            )
    finally:
        # The next stream has its own sender, and chunks must stay in order.
        gone.set()
        stream.close()
        sender.join()
    if failed:
        raise failed[0]


def _take(take: _Take, gone: threading.Event, room: threading.Semaphore, failed: list[Exception]) -> Chunk | None:
    """The next chunk once there is room for it. Chunks sent before reading failed are still answered."""
    while not room.acquire(timeout=_ROOM_S):
        if gone.is_set():
            return None
    try:
        return take(gone)
    except Exception as error:
        failed.append(error)
        return None
