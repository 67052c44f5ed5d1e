"""Sources of frames: video files, cameras, network streams, folders; cut into the clips that heads read."""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from apps.found_files import find_files
from apps.video_analytics.sampling import CHUNK_S, SHOWN_FPS, Chunk, ClipShape, Frame, Sampler
from vlora.errors import BadImage
from vlora.opencv import Video, clock, cv2
from vlora.types.video import PICTURE_SUFFIXES, VIDEO_SUFFIXES

_DEEP_OR_CLEAR = {".gif", ".png", ".webp", ".tif", ".tiff"}  # may have more than 8 bits or transparency

_SHOWN_WIDTH = 640
_JPEG_QUALITY = 95
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before a lost camera is reopened


class SourceHealth:
    """What a source delivers. last_s: of `clock`, at the last frame. noted_s: that, or when it was found lost."""

    def __init__(self) -> None:
        self.num_frames = self.num_reconnects = 0
        self.lost, self.error = False, ""
        self.last_s: float | None = None
        self.noted_s = clock()

    def note_frame(self) -> None:
        self.num_reconnects += self.lost and self.num_frames > 0
        self.num_frames, self.lost = self.num_frames + 1, False
        self.last_s = self.noted_s = clock()

    def note_loss(self, why: str) -> None:
        self.lost, self.error, self.noted_s = True, why, clock()


class Source(NamedTuple):
    """name: of its result files. live: a camera, which continues by itself; lost frames are not repeated. health: where
    it is noted."""

    name: str
    address: str
    kind: Literal["file", "live", "pictures"]
    health: SourceHealth | None = None

    @property
    def live(self) -> bool:
        return self.kind == "live"


def find_sources(addresses: Sequence[str], say: Callable[[str], None] = lambda text: None) -> list[Source]:
    """A source for each address: a file, a camera number, a URL; for a folder and those inside each video, and the
    pictures of each folder together.

    Raises BadImage for a folder that has neither or cannot be read. Equal names are numbered. say: called with the
    names of a folder's files that are neither.
    """
    found: list[Source] = []
    for address in addresses:
        if address.isdecimal():
            found.append(Source(f"camera-{address}", address, "live"))
        elif re.match(r"\w+://", address):
            place = re.sub(r"^\w+://", "", without_password(address))
            found.append(Source(re.sub(r"\W+", "-", place).strip("-")[:80] or "stream", address, "live"))
        elif os.path.isdir(address):
            found += _of_folder(Path(address), say)
        else:
            kind: Literal["pictures", "file"] = "pictures" if is_picture(Path(address)) else "file"
            found.append(Source(Path(address).stem or "video", address, kind))
    names = unique_names([source.name for source in found])
    return [source._replace(name=name) for source, name in zip(found, names, strict=True)]


def is_picture(path: Path) -> bool:
    """Whether a file is a picture, by its suffix; a GIF with several frames is a video."""
    suffix = path.suffix.lower()
    if suffix != ".gif":
        return suffix in PICTURE_SUFFIXES
    try:
        str(path).encode()  # OpenCV aborts on others
        return cv2.imcount(str(path)) == 1
    except (UnicodeEncodeError, cv2.error):
        return True  # the error is reported when the picture is read


def without_password(address: str) -> str:
    """Remove a camera's password from the address, for file names and messages."""
    address = re.sub(r"^(\w+://)[^?#]*@", r"\1", address)  # a password may contain a slash
    names = r"\w*(?:pas|pwd?|token|secret|key|auth)\w*"
    return re.sub(rf"(?i)(?<=[?&]){names}=[^&]*&?", "", address).rstrip("?&")


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with a number appended to those used earlier in the list."""
    taken: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
        taken[next(free for free in numbered if free not in taken)] = None
    return list(taken)


def _of_folder(folder: Path, say: Callable[[str], None]) -> list[Source]:
    """The videos in a folder and the folders inside, and the pictures of each, without the results of an earlier run.

    Raises BadImage.
    """

    def refuse(error: BadImage) -> None:
        raise error

    files = find_files(folder, VIDEO_SUFFIXES + PICTURE_SUFFIXES, "no video and no picture", refuse, say)
    files = [path for path in files if not _is_result(path)]
    top, found = folder.resolve().name, []
    pictures = list(filter(is_picture, files))
    for path in sorted({*files} - {*pictures}):
        inside = path.relative_to(folder).with_suffix("").parts
        found.append(Source("-".join(inside), str(path), "file"))
    for parent in dict.fromkeys(path.parent for path in pictures):
        found.append(Source("-".join(parent.relative_to(folder).parts) or top, str(parent), "pictures"))
    if not found:
        raise BadImage(f"folder {str(folder)!r} contains results of `vlora stream` only; give a folder of videos")
    return found


def _is_result(path: Path) -> bool:
    """Whether `vlora stream` wrote a video with its rows beside it, or a picture or a clip of an event."""
    is_event = path.parent.suffix == ".events"
    rows = path.parent if is_event else path.with_suffix("")
    return (path.suffix == ".webm" or is_event) and rows.with_name(f"{rows.name}.jsonl").exists()


def _files(folder: Path) -> list[Path]:
    """The files of a folder in order of their names. Raises BadImage."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise BadImage(f"cannot read folder {str(folder)!r}: {error.strerror}") from error


def read_clips(
    source: Source,
    shapes: Sequence[ClipShape],
    *,
    stop: threading.Event | None = None,
    shown: bool = False,
    say: Callable[[str], None] = lambda text: None,
    wait_s: float = 0.0,
) -> Iterator[tuple[int, Chunk]]:
    """Cut a source into clips of several shapes at once: yields each clip with the index of its shape in `shapes`.

    The source is opened and decoded once. A last, shorter clip repeats frames if it has too few. In a folder, each clip
    has as many pictures as its shape has frames; a picture that cannot be decoded is a clip with a `problem`. A lost
    camera is reopened, with pauses of up to 30 s, until `stop` is set; `say` is called. The same applies for `wait_s`
    seconds to a camera that is not available at startup.

    Args:
        shown: keep pictures for the annotated video.

    Raises:
        BadImage: a file, a folder, or a camera at startup, cannot be read or contains no frame; or a file has fewer
            frames per second than a shape requires.
    """
    stop, health = stop or threading.Event(), source.health or SourceHealth()
    if source.kind == "pictures":
        yield from _read_pictures(Path(source.address), shapes, stop, shown)
        return
    indices, pause_s = [0] * len(shapes), FIRST_PAUSE_S
    began = clock()
    while not stop.is_set():
        why = "the camera sends no more frames"
        try:
            report = say if not any(indices) else lambda text: None
            clips = read_video(source, shapes, stop, shown, report, began if source.live else None, health)
            for place, chunk in clips:
                utc = time.time() - (clock() - began) if source.live else None
                yield place, msgspec.structs.replace(chunk, index=indices[place], began=utc)
                indices[place], pause_s = indices[place] + 1, FIRST_PAUSE_S
        except BadImage as error:
            if not source.live or (not any(indices) and clock() - began >= wait_s):
                raise
            why = str(error)
        if not source.live:
            return
        if not stop.is_set():
            health.note_loss(why)
            say(f"{source.name}: {why}; retrying in {pause_s:.0f} s")
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def read_video(
    source: Source,
    shapes: Sequence[ClipShape],
    stop: threading.Event,
    shown: bool,
    say: Callable[[str], None],
    since: float | None,
    health: SourceHealth,
) -> Iterator[tuple[int, Chunk]]:
    """The clips of a file, or of a camera until it is lost. since: see `Video`."""
    message = f"cannot read video {without_password(source.address)!r}"
    number = source.address.isdecimal()
    try:
        video = Video(int(source.address) if number else source.address, since)
    except BadImage as error:
        raise BadImage(f"{message}: {_why_closed(source, str(error))}") from error
    with video:
        _check_rate(shapes, video.rate, source, message, say)
        samplers = [Sampler(shape, 1 / (video.rate or SHOWN_FPS), shown) for shape in shapes]
        num_clips = 0
        for time_s in video:
            health.note_frame()
            chunks = [(place, sampler.advance(time_s)) for place, sampler in enumerate(samplers)]
            picture = video.picture() if any(sampler.wants for sampler in samplers) else None
            frame = None if picture is None else _frame(picture)
            chunks += [(place, sampler.add(frame)) for place, sampler in enumerate(samplers)]
            for place, chunk in chunks:
                if chunk is not None:
                    num_clips += 1
                    yield place, chunk
            if stop.is_set():
                return
        for place, sampler in enumerate(samplers):
            if (chunk := sampler.rest()) is not None:
                num_clips += 1
                yield place, chunk
        if num_clips == 0:
            raise BadImage(f"{message}: it contains no frame that can be decoded")


def _check_rate(
    shapes: Sequence[ClipShape], rate: float | None, source: Source, message: str, say: Callable[[str], None]
) -> None:
    """Refuse a file with a declared rate below a shape's; `say` it once of a camera, as its rate may be wrong.

    Raises:
        BadImage: a file has a lower rate.
    """
    wanted = max((shape.fps for shape in shapes if shape.fps is not None), default=0.0)
    if rate is None or wanted <= rate * 1.01:  # 30 frames per second are declared as 29.999
        return
    if not source.live:
        lower = "give a lower --fps, or a lower `rate` in a plan"
        raise BadImage(f"{message} at {wanted:g} frames per second: it has {rate:g} on average; {lower}")
    say(f"{source.name}: the camera declares {rate:g} frames per second, not {wanted:g}; missing frames are repeated")


def _frame(picture: cv2.typing.MatLike) -> Frame:
    return Frame(functools.partial(_jpeg, picture), lambda: _jpeg(_smaller(picture)), picture.shape[1])


def _why_closed(source: Source, why: str) -> str:
    if source.address.isdecimal():
        path = f"; write ./{source.address} for the file or folder" if os.path.exists(source.address) else ""
        return f"no camera has that number, or another program uses it{path}"
    if source.live:
        return "the address does not respond, or it is not a video that this machine can decode"
    return why if "UTF-8" in why or os.path.exists(source.address) else "no such file or address"


def _read_pictures(
    folder: Path, shapes: Sequence[ClipShape], stop: threading.Event, shown: bool
) -> Iterator[tuple[int, Chunk]]:
    if folder.is_dir():
        files = list(filter(is_picture, _files(folder)))
    else:
        read_picture(folder)  # its error is that of the source
        files = [folder]
    groups: list[list[_Picture]] = [[] for _ in shapes]
    indices = [0] * len(shapes)
    num_decoded = 0
    for path in files:
        if stop.is_set():
            return
        try:
            frame = _frame(read_picture(path))
        except BadImage as error:
            for place, index in enumerate(indices):
                yield place, Chunk(index, index * CHUNK_S, (), problem=str(error))
            indices = [index + 1 for index in indices]
            continue
        num_decoded += 1
        for place, (group, shape) in enumerate(zip(groups, shapes, strict=True)):
            group.append(_Picture(frame.jpeg, frame.small if shown or shape.every_frame else None, frame.width))
            if len(group) == shape.num_frames:
                yield place, _clip_of_pictures(indices[place], group)
                indices[place] += 1
                group.clear()
    for place, (group, shape) in enumerate(zip(groups, shapes, strict=True)):
        if group:
            yield place, _clip_of_pictures(indices[place], group + group[-1:] * (shape.num_frames - len(group)))
    if not num_decoded:
        raise BadImage(f"folder {str(folder)!r} contains no picture that can be decoded")


class _Picture(NamedTuple):
    """A picture of a folder. small: None if it is not kept."""

    jpeg: bytes
    small: bytes | None
    width: int


def _clip_of_pictures(index: int, group: Sequence[_Picture]) -> Chunk:
    frames = tuple(picture.jpeg for picture in group)
    small = tuple(picture.small for picture in group if picture.small is not None)
    times = tuple(place * CHUNK_S / len(group) for place in range(len(small)))
    return Chunk(index, index * CHUNK_S, frames, small, group[-1].width, shown_s=times)


def read_picture(path: Path) -> cv2.typing.MatLike:
    """The decoded picture, BGR, with transparency composed over white as by the server. Raises BadImage, also for
    samples that OpenCV would clip: those of more than 8 bits that are signed or floats."""
    stored = None
    try:
        str(path).encode()  # OpenCV aborts on others
        picture = cv2.imread(str(path))
        if path.suffix.lower() in _DEEP_OR_CLEAR:
            stored = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)  # without rotation by EXIF
    except UnicodeEncodeError as error:
        raise BadImage(f"cannot read picture {str(path)!r}: its name is not UTF-8; rename it") from error
    except cv2.error as error:
        raise BadImage(f"cannot read picture {str(path)!r}: OpenCV requires {error.err}") from error
    if stored is not None and stored.dtype not in (np.uint8, np.uint16):
        raise BadImage(f"{str(path)!r} has samples of type {stored.dtype}; convert it to 8 or 16 bits")
    if picture is None:
        why = "is not a picture that this machine can decode" if path.exists() else "does not exist"
        raise BadImage(f"{str(path)!r} {why}")
    if stored is None or stored.ndim < 3 or stored.shape[2] != 4:
        return picture
    shares = stored / (255 if stored.dtype == np.uint8 else 65535)
    colors, alpha = shares[..., :3], shares[..., 3:]
    if alpha.min() == 1:
        return picture
    if stored.dtype == np.uint8 and not np.array_equal(picture, stored[..., :3]):
        raise BadImage(f"{str(path)!r} is transparent and rotated by EXIF; save it upright")
    # OpenCV multiplies the colors of a TIFF of 8 bits by its transparency.
    shown = colors if path.suffix.lower().startswith(".tif") and stored.dtype == np.uint8 else colors * alpha
    return np.rint(255 * (shown + 1 - alpha)).astype(np.uint8)


def _smaller(frame: cv2.typing.MatLike) -> cv2.typing.MatLike:
    height, width = frame.shape[:2]
    if width <= _SHOWN_WIDTH:
        return frame
    return cv2.resize(frame, (_SHOWN_WIDTH, round(height * _SHOWN_WIDTH / width)), interpolation=cv2.INTER_AREA)


def _jpeg(frame: cv2.typing.MatLike) -> bytes:
    return cv2.imencode(".jpg", frame, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1].tobytes()
