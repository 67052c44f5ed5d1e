"""A source's clips through a stream of the server, and what came back: in order, across broken connections."""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from apps.video_analytics.reading import Reading
from apps.video_analytics.sampling import Chunk, ClipShape
from apps.video_analytics.sources import Source
from vlora.client import Client, FrameStream, HeadResult
from vlora.errors import Disconnected, EngineDead, OverCapacity, UnknownAdapter, UnknownHead, UnknownStream
from vlora.types import HeadSummary

CHUNKS_IN_FLIGHT = 4  # that the server answers at once, of a stream

_MOST_UNREAD = 12  # chunks sent whose results were not taken yet: they are held here, and finished after Ctrl-C
_ROOM_S = 0.5
_PATIENCE_S = 120.0  # how long a server that is gone is waited for
_PAUSE_S = 1.0

# What a later attempt may not meet: the head was there when the source was begun, and will be once it is loaded again.
_AWAY = (Disconnected, EngineDead, UnknownStream, UnknownAdapter, UnknownHead, OverCapacity)


_Take = Callable[[threading.Event], Chunk | None]


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a chunk. latency_s: on the server, from its arrival to its answer.

    answer: None, and problem says why, where the chunk was dropped or failed. time: when the answer came, UTC.
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
    """Ask one head about every clip of a source; see `answer`, which this reads for, and `read_clips`.

    Args:
        fps: frames a second of the head's clips; None makes a clip of each second.
        shown, say, wait_s: see `read_clips`.

    Raises:
        BadImage: the source cannot be read.
        UnknownAdapter, UnknownHead: the server does not have them.
    """
    stop = stop or threading.Event()
    shape = ClipShape(find_head(client, adapter, head).num_frames, fps)
    reading = Reading(source, [shape], stop=stop, shown=shown, say=say, wait_s=wait_s)
    yield from answer(
        client,
        source,
        adapter,
        head,
        reading,
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
    reading: Reading,
    place: int,
    *,
    max_latency_s: float | None = None,
    stop: threading.Event,
    say: Callable[[str], None] = lambda text: None,
    patience_s: float = _PATIENCE_S,
) -> Iterator[tuple[Chunk, ChunkResult]]:
    """Ask a head about every clip that is read for it; each clip with its result, in order.

    Of a camera that is faster than the server, older clips give way to newer ones; of a file none. When `stop` is set
    no more is read, and what was sent is still answered. A server that is gone or full, or has lost the head, is waited
    for, of a file up to `patience_s`, and clips without an answer are sent again; `say` is notified once, and again
    when the reason changes.

    Args:
        reading: of the source. place: of the head in it; it is left at the end.

    Raises:
        BadImage: the source cannot be read.
        VLoraError: what the client raises.
    """
    unanswered: deque[Chunk] = deque()
    lost_at: float | None = None
    told = ""
    take = functools.partial(reading.take, place)
    try:
        while True:
            try:
                with client.open_stream(
                    adapter=adapter, head=head, max_latency_s=max_latency_s, drop="newest" if source.live else "none"
                ) as stream:
                    for pair in _through(stream, take, unanswered, source, head):
                        lost_at, told = None, ""
                        yield pair
                    return
            except _AWAY as error:
                lost_at = lost_at or time.monotonic()
                if stop.is_set() or (not source.live and time.monotonic() - lost_at > patience_s):
                    raise
                if told != (told := str(error)):
                    say(f"{source.name}: {error}; trying again")
                stop.wait(_PAUSE_S)
    finally:
        reading.leave(place)


def find_head(client: Client, adapter: str, head: str) -> HeadSummary:
    """What the server knows of a head. Raises UnknownAdapter, UnknownHead with the names there are."""
    adapters = {status.name: status for status in client.adapters()}
    if adapter not in adapters:
        raise UnknownAdapter(f"no adapter named {adapter!r}; registered: {', '.join(adapters) or 'none'}")
    heads = {summary.name: summary for summary in adapters[adapter].heads}
    if head not in heads:
        owners = [name for name, status in adapters.items() if any(summary.name == head for summary in status.heads)]
        hint = f"; head {head!r} belongs to adapter {' and '.join(map(repr, owners))}" if owners else ""
        raise UnknownHead(f"adapter {adapter!r} has no head {head!r}; its heads: {', '.join(heads) or 'none'}{hint}")
    return heads[head]


def _through(
    stream: FrameStream, take: _Take, unanswered: deque[Chunk], source: Source, head: str
) -> Iterator[tuple[Chunk, ChunkResult]]:
    """What the source gives through one stream. Chunks move through `unanswered`: what is there at the start goes
    first, what is there at the end had no answer."""
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
            stream.close()  # who reads results learns it by that

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        for result in stream:
            error = None if result.error is None else result.error.to_exception()
            if isinstance(error, _AWAY):
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
        # The next stream has a sender of its own, and chunks must not pass each other.
        gone.set()
        stream.close()
        sender.join()
    if failed:
        raise failed[0]


def _take(take: _Take, gone: threading.Event, room: threading.Semaphore, failed: list[Exception]) -> Chunk | None:
    """The next chunk once there is room for it. What was sent before reading failed is still answered."""
    while not room.acquire(timeout=_ROOM_S):
        if gone.is_set():
            return None
    try:
        return take(gone)
    except Exception as error:
        failed.append(error)
        return None
