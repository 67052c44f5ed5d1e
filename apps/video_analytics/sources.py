"""Where frames come from: video files, cameras, network streams, folders; cut into chunks of a second."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from apps.opencv import cv2
from vlora.errors import BadImage

CHUNK_S = 1.0
FALLBACK_FPS = 30.0  # for containers that do not say
VIDEO_SUFFIXES = {".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".ts"}
PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}
SHOWN_FPS = 10.0
"""Pictures a second that are kept for the annotated video, at most."""

_SHOWN_WIDTH = 640
_JPEG_QUALITY = 95
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before a camera that was lost is opened again


class Source(NamedTuple):
    """name: of its result files. live: a camera, which goes on by itself; what is lost of it does not come again."""

    name: str
    address: str
    kind: Literal["file", "live", "pictures"]

    @property
    def live(self) -> bool:
        return self.kind == "live"


class Chunk(msgspec.Struct, frozen=True):
    """A second of video. start_s: from the source's beginning. frames: JPEG, spread evenly over it, for the head.

    shown: JPEG, smaller and at most `SHOWN_FPS` a second, for the annotated video. width: of `frames`, in pixels.
    """

    index: int
    start_s: float
    frames: tuple[bytes, ...]
    shown: tuple[bytes, ...] = ()
    width: int = 0


def find_sources(addresses: Sequence[str]) -> list[Source]:
    """A source for each address: a file, a camera's number, a URL; of a folder its videos, and its pictures together.

    Raises BadImage for a folder with neither. Names are told apart by number where they are alike.
    """
    found: list[Source] = []
    for address in addresses:
        if address.isdecimal():
            found.append(Source(f"camera-{address}", address, "live"))
        elif re.match(r"\w+://", address):
            place = re.sub(r"^\w+://", "", _without_password(address))
            found.append(Source(re.sub(r"\W+", "-", place).strip("-")[:80] or "stream", address, "live"))
        elif os.path.isdir(address):
            found += _of_folder(Path(address))
        else:
            found.append(Source(Path(address).stem or "video", address, "file"))
    return _told_apart(found)


def _without_password(address: str) -> str:
    """A camera's password is neither for names of files nor for messages."""
    address = re.sub(r"^(\w+://)[^/]*@", r"\1", address)
    return re.sub(r"(?i)(?<=[?&])(pass\w*|pwd|token|secret|key|auth)=[^&]*&?", "", address).rstrip("?&")


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    taken: set[str] = set()
    named = []
    for source in sources:
        names = (f"{source.name}-{number}" if number > 1 else source.name for number in itertools.count(1))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        named.append(source._replace(name=name))
    return named


def _of_folder(folder: Path) -> list[Source]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = [Source(path.stem, str(path), "file") for path in files if path.suffix.lower() in VIDEO_SUFFIXES]
    if any(path.suffix.lower() in PICTURE_SUFFIXES for path in files):
        found.append(Source(folder.resolve().name, str(folder), "pictures"))
    if not found:
        raise BadImage(f"folder {str(folder)!r} holds no video and no picture")
    return found


def read_chunks(
    source: Source,
    num_frames: int,
    *,
    stop: threading.Event | None = None,
    shown: bool = False,
    say: Callable[[str], None] = lambda text: None,
    wait_s: float = 0.0,
) -> Iterator[Chunk]:
    """Cut a source into chunks of CHUNK_S, num_frames of each; a last, shorter chunk repeats frames if it has too few.

    Of a folder's pictures num_frames make a chunk. A camera that is lost is opened again, with pauses of up to 30 s,
    until `stop` is set; `say` is told. So is one that is not there at first, for `wait_s` seconds. shown: keep pictures
    for the annotated video.

    Raises BadImage when a file, or a camera at first, cannot be opened or holds no frame.
    """
    stop = stop or threading.Event()
    if source.kind == "pictures":
        yield from _read_pictures(Path(source.address), num_frames, stop, shown)
        return
    index, pause_s = 0, _FIRST_PAUSE_S
    began = time.monotonic()
    while not stop.is_set():
        why = "no picture any more"
        try:
            for chunk in _read_video(source, num_frames, stop, shown):
                start_s = time.monotonic() - began - CHUNK_S if source.live else chunk.start_s
                yield msgspec.structs.replace(chunk, index=index, start_s=max(0.0, start_s))
                index, pause_s = index + 1, _FIRST_PAUSE_S
        except BadImage as error:
            if not source.live or (index == 0 and time.monotonic() - began >= wait_s):
                raise
            why = str(error)
        if not source.live:
            return
        if not stop.is_set():
            say(f"{source.name}: {why}; trying again in {pause_s:.0f} s")
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _read_video(source: Source, num_frames: int, stop: threading.Event, shown: bool) -> Iterator[Chunk]:
    told = f"cannot read video {_without_password(source.address)!r}"
    _check_name(source.address, told)
    capture = cv2.VideoCapture(int(source.address) if source.address.isdecimal() else source.address)
    try:
        if not capture.isOpened():
            raise BadImage(f"{told}: {_why_closed(source)}")
        fps = capture.get(cv2.CAP_PROP_FPS)
        length = max(num_frames, round((fps if 0 < fps < 1000 else FALLBACK_FPS) * CHUNK_S))
        index = 0
        while not stop.is_set() and (chunk := _sample(capture, length, num_frames, shown)) is not None:
            yield msgspec.structs.replace(chunk, index=index, start_s=index * CHUNK_S)
            index += 1
        if index == 0 and not stop.is_set():
            raise BadImage(f"{told}: it holds no frame that can be decoded")
    finally:
        capture.release()


def _why_closed(source: Source) -> str:
    if source.address.isdecimal():
        return "there is no camera of that number, or another program has it"
    if source.live:
        return "nothing answers there, or it is no video this machine can decode"
    if os.path.exists(source.address):
        return "it is no video this machine can decode"
    return "there is no such file or address"


def _check_name(path: str, told: str) -> None:
    """OpenCV ends the process over a name that is no text. Raises BadImage."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise BadImage(f"{told}: its name is not UTF-8; rename it") from error


def _read_pictures(folder: Path, num_frames: int, stop: threading.Event, shown: bool) -> Iterator[Chunk]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_SUFFIXES)
    for index in range(0, -(-len(files) // num_frames)):
        if stop.is_set():
            return
        group = files[index * num_frames : (index + 1) * num_frames]
        group += group[-1:] * (num_frames - len(group))
        pictures = [_read_picture(path) for path in group]
        kept = tuple(_jpeg(_smaller(picture)) for picture in pictures) if shown else ()
        frames = tuple(_jpeg(picture) for picture in pictures)
        yield Chunk(index, index * CHUNK_S, frames, kept, pictures[-1].shape[1])


def _read_picture(path: Path) -> cv2.typing.MatLike:
    _check_name(str(path), f"cannot read picture {str(path)!r}")
    picture = cv2.imread(str(path))
    if picture is None:
        raise BadImage(f"{str(path)!r} is no picture this machine can decode")
    return picture


def spread(count: int, length: int) -> list[int]:
    """`count` places from the first to the last of `length`; a single one is the middle."""
    if count == 1:
        return [length // 2]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]


def _sample(capture: cv2.VideoCapture, length: int, num_frames: int, shown: bool) -> Chunk | None:
    """Read a chunk of `length` frames; None at the video's end."""
    wanted = set(spread(num_frames, length))
    kept = set(spread(min(length, round(SHOWN_FPS * CHUNK_S)), length)) if shown else set()
    frames, pictures, width = [], [], 0
    for place in range(length):
        if not capture.grab():
            break
        if place in wanted or place in kept:
            decoded, frame = capture.retrieve()
            if not decoded:
                continue
            width = frame.shape[1]
            if place in wanted:
                frames.append(_jpeg(frame))
            if place in kept:
                pictures.append(_jpeg(_smaller(frame)))
    if not frames:
        return None
    return Chunk(0, 0.0, tuple(frames[place] for place in spread(num_frames, len(frames))), tuple(pictures), width)


def _smaller(frame: cv2.typing.MatLike) -> cv2.typing.MatLike:
    height, width = frame.shape[:2]
    if width <= _SHOWN_WIDTH:
        return frame
    return cv2.resize(frame, (_SHOWN_WIDTH, round(height * _SHOWN_WIDTH / width)), interpolation=cv2.INTER_AREA)


def _jpeg(frame: cv2.typing.MatLike) -> bytes:
    return cv2.imencode(".jpg", frame, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1].tobytes()
