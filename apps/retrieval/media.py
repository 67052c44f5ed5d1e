"""The files of an index: found in folders, recognized when they change, and cut into clips."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from apps.found_files import find_files
from apps.video_analytics import ClipShape, Source, read_clips
from apps.video_analytics.sampling import spread
from apps.video_analytics.sources import is_picture, read_picture
from vlora.errors import BadImage
from vlora.opencv import cv2
from vlora.types.video import PICTURE_SUFFIXES, VIDEO_SUFFIXES

_JPEG_QUALITY = 90
_READ_BYTES = 1 << 20


class Media(NamedTuple):
    """A file to index. path: absolute."""

    path: Path
    kind: Literal["video", "picture"]


class Fingerprint(NamedTuple):
    """Identifies a version of a file. size, mtime_ns: compared first. digest: of the content, if they differ."""

    size: int
    mtime_ns: int
    digest: str


class Clip(NamedTuple):
    """A part of a file. number: in the file, from 0. frames: JPEG; one of a picture, else as many as the index has."""

    number: int
    start_s: float
    seconds: float
    frames: tuple[bytes, ...]

    def pick(self, num_frames: int) -> list[bytes]:
        """`num_frames` of its frames, evenly; repeated if it has fewer."""
        return [self.frames[place] for place in spread(num_frames, len(self.frames))]


def find_media(
    paths: Sequence[str | Path], on_error: Callable[[BadImage], None], say: Callable[[str], None]
) -> list[Media]:
    """The given files, and the videos and pictures of the given folders and their folders, each once, in order of name.

    Args:
        on_error: called with the error of each folder in a given one that cannot be read.
        say: called with the names of a folder's files that are neither.

    Raises:
        BadImage: a path does not exist, cannot be read or is a stream, or a folder contains no video and no picture.
    """
    found: dict[Path, Media] = {}
    for given in paths:
        if re.match(r"\w+://", str(given)):
            raise BadImage(f"cannot index {str(given)!r}: an index is made of files; record the stream to a file first")
        for file in find_files(given, VIDEO_SUFFIXES + PICTURE_SUFFIXES, "no video and no picture", on_error, say):
            path = Path(os.path.abspath(file))
            found[path] = Media(path, "picture" if is_picture(path) else "video")
    return list(found.values())


def check_name(path: Path) -> None:
    """Raises BadImage for a path that is not UTF-8 text, which neither the index nor OpenCV accepts."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BadImage(f"cannot index {str(path)!r}: its path is not UTF-8; rename it") from error


def fingerprint(path: Path, known: Fingerprint | None) -> Fingerprint:
    """The file's fingerprint; its content is read only if size or time differ from the known one's. Raises BadImage."""
    try:
        stat = path.stat()
        if known is not None and known[:2] == (stat.st_size, stat.st_mtime_ns):
            return known
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            for part in iter(functools.partial(file.read, _READ_BYTES), b""):
                digest.update(part)
    except OSError as error:
        raise BadImage(f"cannot read {str(path)!r}: {error.strerror}") from error
    return Fingerprint(stat.st_size, stat.st_mtime_ns, digest.hexdigest())


def read_media(
    media: Media, shape: ClipShape, max_side: int, stop: threading.Event, say: Callable[[str], None]
) -> Iterator[Clip]:
    """The clips of a file, with frames of at most `max_side` pixels per side. Stops early when `stop` is set.

    Raises:
        BadImage: it cannot be read, contains no frame, or has fewer frames per second than the shape requires.
    """
    if media.kind == "picture":
        yield Clip(0, 0.0, 0.0, (encoded_picture(media.path, max_side),))
        return
    source = Source(media.path.stem, str(media.path), "file")
    for _, chunk in read_clips(source, [shape], stop=stop, say=say):
        frames = tuple(_shrink(frame, max_side) for frame in chunk.frames)
        yield Clip(chunk.index, chunk.start_s, chunk.seconds, frames)


def encoded_picture(path: Path, max_side: int) -> bytes:
    """A picture as the index stores it. Raises BadImage."""
    return fit(read_picture(path), max_side)


def widened(picture: bytes, margin: float) -> bytes:
    """A picture with its borders continued. margin: on each side, as a share of its length."""
    decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None, "`encoded_picture` has encoded it"
    rows, columns = (round(side * margin) for side in decoded.shape[:2])
    wide = cv2.copyMakeBorder(decoded, rows, rows, columns, columns, cv2.BORDER_REPLICATE)
    return fit(wide, max(wide.shape))


def _shrink(jpeg: bytes, max_side: int) -> bytes:
    """The picture itself if it is small enough, so that it is not compressed twice."""
    picture = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None, "the reader of the video has encoded it"
    return jpeg if max(picture.shape[:2]) <= max_side else fit(picture, max_side)


def fit(picture: cv2.typing.MatLike, max_side: int) -> bytes:
    """A JPEG, made smaller if a side has more pixels."""
    height, width = picture.shape[:2]
    if (scale := max_side / max(height, width)) < 1:
        size = max(1, round(width * scale)), max(1, round(height * scale))
        picture = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1].tobytes()
