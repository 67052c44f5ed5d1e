"""Sends a source's clips through a server stream and yields the results in order, across broken connections."""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from apps.video_analytics.asked import Asked, Group, find_groups
from apps.video_analytics.sampling import Chunk
from apps.video_analytics.source_reader import SourceReader
from apps.video_analytics.sources import Source
from vlora.client import Answer, Client, FrameAnswer, FrameResult, FrameStream, HeadResult
from vlora.errors import Disconnected, EngineDead, OverCapacity, UnknownAdapter, UnknownHead, UnknownStream

CHUNKS_IN_FLIGHT = 4  # of a stream that the server answers concurrently

_MOST_UNREAD = 12  # chunks sent without a taken result: they are buffered here, and finished after Ctrl-C
_ROOM_S = 0.5
_PATIENCE_S = 120.0  # how long to wait for an unreachable server
PAUSE_S = 1.0

# Errors that are temporary after a successful start: the head existed then, and will exist again once it is reloaded.
_RETRIED_ERRORS = (Disconnected, EngineDead, UnknownStream, UnknownAdapter, UnknownHead, OverCapacity)
_RETRIED_FOR_ONE = (Disconnected, EngineDead, OverCapacity)  # of one answer beside others, which need not wait


_Take = Callable[[threading.Event], Chunk | None]


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a chunk. latency_s: on the server, from its arrival to the last of its answers.

    task: short name of the head or question, unique in the source; the one of its files and of a plan. head: empty for
    a question, `question` for a head. label: of the head's answer, or the text. answer, text: None if
    the chunk was dropped or failed; problem is then the cause. time: when a camera took the clip's first
    frame; of other sources, when it was answered; UTC. tracks: numbers of the objects of a tracked detection, in the
    order of the answer's boxes.
    """

    source: str
    task: str = ""
    head: str
    index: int
    start_s: float
    time: datetime.datetime
    latency_s: float
    label: str = ""
    confidence: float = 0.0
    answer: HeadResult | None = None
    problem: str | None = None
    adapter: str | None = None
    question: str = ""
    text: Answer | None = None
    tracks: tuple[int, ...] = ()


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
    (group,) = find_groups(client, [adapter], [head], fps=fps)
    reader = SourceReader(source, [group.shape], stop=stop, shown=shown, say=say, wait_s=wait_s)
    for chunk, (result,) in answer(
        client,
        source,
        group,
        reader,
        0,
        max_latency_s=max_latency_s,
        stop=stop,
        say=say,
        patience_s=patience_s,
    ):
        yield chunk, result


def answer(
    client: Client,
    source: Source,
    group: Group,
    reader: SourceReader,
    place: int,
    *,
    max_latency_s: float | None = None,
    stop: threading.Event,
    say: Callable[[str], None] = lambda text: None,
    patience_s: float = _PATIENCE_S,
) -> Iterator[tuple[Chunk, tuple[ChunkResult, ...]]]:
    """Query a group about every clip read for it; yields each clip with the group's results, in order.

    If a camera is faster than the server, newer clips replace older ones, and a result with a problem stands for those
    replaced at once; no clip of a file is dropped. When `stop` is
    set, no more clips are read, and clips already sent are still answered. If the server is unreachable or full, or has
    lost all heads of the group, their return is awaited (for a file up to `patience_s`), and clips without an answer
    are sent again; `say` is called once, and again when the reason changes.

    Args:
        reader: of the source. place: of the group in it; the group leaves it at the end.

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
                    heads=group.heads,
                    questions=group.questions,
                    max_latency_s=max_latency_s,
                    drop="newest" if source.live else "none",
                    name=source.name.encode(errors="replace").decode()[:100],
                ) as stream:
                    for pair in _answer_clips(stream, take, unanswered, source, group):
                        if pair[0].problem is None:
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


def _answer_clips(
    stream: FrameStream, take: _Take, unanswered: deque[Chunk], source: Source, group: Group
) -> Iterator[tuple[Chunk, tuple[ChunkResult, ...]]]:
    """The clips and results of a source through one stream. Chunks move through `unanswered`: its initial chunks are
    sent first, and its final chunks have no answer. Chunks with a problem are not sent, and keep their place.
    """
    failed: list[Exception] = []
    again = tuple(chunk for chunk in unanswered if chunk.problem is None)
    gone = threading.Event()
    room = threading.Semaphore(_MOST_UNREAD - len(again))

    def send() -> None:
        try:
            for chunk in again:
                stream.send(*chunk.frames)
            for chunk in iter(functools.partial(_take, take, gone, room, failed), None):
                unanswered.append(chunk)
                if chunk.problem is None:
                    stream.send(*chunk.frames)
                else:
                    room.release()
            if not gone.is_set():
                stream.end()
        except Exception as error:
            failed.append(error)
            stream.close()  # notifies the reader of the results

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        for result in stream:
            if (error := _retried_error(result)) is not None:
                raise error
            yield from _unsent(unanswered, source, group)
            chunk = unanswered.popleft()
            room.release()
            answers = _in_order(group, result)
            yield chunk, tuple(map(functools.partial(_chunk_result, source, chunk, result), group.asked, answers))
    finally:
        # The next stream has its own sender, and chunks must stay in order.
        gone.set()
        stream.close()
        sender.join()
    yield from _unsent(unanswered, source, group)
    if failed:
        raise failed[0]


def _unsent(unanswered: deque[Chunk], source: Source, group: Group) -> Iterator[tuple[Chunk, tuple[ChunkResult, ...]]]:
    """The results of the first chunks of `unanswered` that have a problem."""
    while unanswered and unanswered[0].problem is not None:
        chunk = unanswered.popleft()
        result = FrameResult(number=chunk.index, latency_s=0.0, dropped=chunk.problem)
        yield chunk, tuple(_chunk_result(source, chunk, result, asked, None) for asked in group.asked)


def _retried_error(result: FrameResult) -> Exception | None:
    """An error that a new stream may not have."""
    if result.error is not None:
        error = result.error.to_exception()
        return error if isinstance(error, _RETRIED_ERRORS) else None
    errors = (each.error.to_exception() for each in result.answers if each.error is not None)
    return next((error for error in errors if isinstance(error, _RETRIED_FOR_ONE)), None)


def _in_order(group: Group, result: FrameResult) -> tuple[FrameAnswer | None, ...]:
    """The answers in the order of the group's heads and questions; all None if the frame has none."""
    if not result.answers:
        return (None,) * len(group.asked)
    found = {(each.adapter, each.head or "", each.question or ""): each for each in result.answers}
    return tuple(found[asked.adapter, asked.head, asked.question] for asked in group.asked)


def _chunk_result(
    source: Source, chunk: Chunk, result: FrameResult, asked: Asked, answer: FrameAnswer | None
) -> ChunkResult:
    error = result.error if answer is None else answer.error
    head_result = None if answer is None else answer.answer
    return ChunkResult(
        source=source.name,
        task=asked.name,
        head=asked.head,
        index=chunk.index,
        start_s=chunk.start_s,
        time=chunk.utc(chunk.start_s),
        latency_s=result.latency_s,
        label="" if answer is None or answer.label is None else answer.label,
        confidence=0.0 if head_result is None else head_result.confidence,
        answer=head_result,
        problem=result.dropped or (None if error is None else error.message),
        adapter=asked.adapter,
        question=asked.question,
        text=None if answer is None else answer.text,
    )


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
