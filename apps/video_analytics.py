"""Video to answers: cut a video into chunks of a second, ask a task head about each, results in order as they come."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from apps.opencv import cv2
from vlora.client import Client
from vlora.errors import BadImage, UnknownAdapter, UnknownHead
from vlora.types import HeadSummary

CHUNK_S = 1.0

CHUNKS_IN_FLIGHT = 4  # asked about while the next is read
FALLBACK_FPS = 30.0  # for containers that do not say
_JPEG_QUALITY = 95


class Chunk(msgspec.Struct, frozen=True):
    """A second of video: JPEG frames spread evenly over it."""

    index: int
    start_s: float
    frames: tuple[bytes, ...]


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """latency_s: from the moment the chunk was complete to its answer."""

    index: int
    start_s: float
    label: str
    confidence: float
    latency_s: float


def analyse(client: Client, video: str, adapter: str, head: str) -> Iterator[ChunkResult]:
    """Ask `head` about every chunk of a video file or camera address.

    Raises BadImage for a video that cannot be read, UnknownAdapter, UnknownHead, and what the client raises.
    """
    num_frames = find_head(client, adapter, head).num_frames

    def ask(chunk: Chunk) -> ChunkResult:
        started = time.monotonic()
        result = client.ask_head(chunk.frames, adapter, head)
        return ChunkResult(
            index=chunk.index,
            start_s=chunk.start_s,
            label=result.label,
            confidence=result.confidence,
            latency_s=time.monotonic() - started,
        )

    waiting: deque[Future[ChunkResult]] = deque()
    with ThreadPoolExecutor(CHUNKS_IN_FLIGHT) as threads:
        for chunk in read_chunks(video, num_frames):
            waiting.append(threads.submit(ask, chunk))
            while waiting and (waiting[0].done() or len(waiting) >= CHUNKS_IN_FLIGHT):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


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


def read_chunks(video: str, num_frames: int) -> Iterator[Chunk]:
    """Cut a video into chunks of CHUNK_S, num_frames of each; a last, shorter chunk repeats frames if it has too few.

    Raises BadImage when the video cannot be opened or holds no frame.
    """
    capture = cv2.VideoCapture(video)
    try:
        if not capture.isOpened():
            why = (
                "it is no video this machine can decode"
                if os.path.exists(video)
                else "there is no such file or address"
            )
            raise BadImage(f"cannot read video {video!r}: {why}")
        fps = capture.get(cv2.CAP_PROP_FPS)
        length = max(num_frames, round((fps if 0 < fps < 1000 else FALLBACK_FPS) * CHUNK_S))
        wanted = _spread(num_frames, length)
        index = 0
        while frames := _sample(capture, length, wanted):
            yield Chunk(index, index * CHUNK_S, tuple(frames[place] for place in _spread(num_frames, len(frames))))
            index += 1
        if index == 0:
            raise BadImage(f"cannot read video {video!r}: it holds no frame that can be decoded")
    finally:
        capture.release()


def _spread(count: int, length: int) -> list[int]:
    """`count` places from the first to the last of `length`; a single one is the middle."""
    if count == 1:
        return [length // 2]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]


def _sample(capture: cv2.VideoCapture, length: int, wanted: list[int]) -> list[bytes]:
    """Read a chunk of `length` frames and keep the wanted ones; fewer, or none, at the video's end."""
    frames = []
    for place in range(length):
        if not capture.grab():
            break
        if place in wanted:
            decoded, frame = capture.retrieve()
            if decoded:
                frames.append(cv2.imencode(".jpg", frame, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1].tobytes())
    return frames
