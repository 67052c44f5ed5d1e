"""Pictures and clips in files, decoded on each access, so that a data set may be larger than memory."""

from __future__ import annotations

import bisect
import codecs
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import unicodedata
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vlora.errors import BadImage
from vlora.models.vision.images import FORMATS, open_image, upright_rgb
from vlora.opencv import cv2, frame_times, frames_at
from vlora.types.video import PICTURE_SUFFIXES

QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height

_ORIENTATION = 0x0112
_SHOWN = 80  # characters of a line
_ELSEWHERE = re.compile(r"/|\.\./|[A-Za-z][\w+.-]*:/")  # a drive of Windows, or a URL
_ROUNDED_S = 1e-3  # error of time stamps in containers


class FileInfo(NamedTuple):
    """digest: hash of a picture's decoded pixels, or of a video file's bytes. size: width and height in pixels."""

    digest: str
    size: tuple[int, int]


class Frames(Sequence[np.ndarray]):
    """RGB uint8 pictures [height, width, 3] of one sample. file: the file that contains them."""

    file: Path

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        raise NotImplementedError

    def verify(self) -> FileInfo:
        """Decode the whole file. Raises ValueError with the reason if it cannot be used."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Picture(Frames):
    """One picture, decoded as in the server."""

    file: Path

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[np.ndarray]:
        with self._opened() as image:
            pixels = np.asarray(upright_rgb(image))
        yield pixels

    def verify(self) -> FileInfo:
        pixels = self[0]
        height, width, _ = pixels.shape
        return FileInfo(hashlib.blake2b(pixels.tobytes(), salt=b"%dx%d" % (width, height)).hexdigest(), (width, height))

    def stored(self) -> tuple[tuple[int, int], int]:
        """Width and height before rotation, and the EXIF orientation, 1 to 8. Raises ValueError as decoding does."""
        with self._opened() as image:
            size, orientation = image.size, image.getexif().get(_ORIENTATION, 1)
            # Pillow gives TIFF's size after rotation.
            turned = image.format == "TIFF" and orientation in QUARTER_TURNS
        return (size[1], size[0]) if turned else size, orientation if orientation in range(1, 9) else 1

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        try:
            with open_image(self.file) as image:
                yield image
        except Exception as error:  # Pillow's readers raise many exception types on broken input
            if isinstance(error, OSError) and error.strerror:
                raise ValueError(f"{self.file} cannot be read: {error.strerror}") from error
            raise ValueError(f"{self.file} is not a valid picture ({', '.join(FORMATS)}): {error}") from error


def find_file(folders: Path | Sequence[Path], name: str, what: str, *, by_end: bool = False) -> Path | str:
    """The file of this name in the first folder that has it, or why there is none: with slashes of any system, and with
    letters composed as the file system does, as it is or decoded from a URL. Of a full path of another machine, a URL,
    or a path with leading `..`, the longest end that exists counts. A picture's name may lack its suffix.

    Args:
        what: "picture", "video" or "folder" (then it is one).
        by_end: the longest end counts for any other name too.
    """
    folders = [folders] if isinstance(folders, Path) else folders
    there = os.path.isdir if what == "folder" else os.path.isfile  # false for a name that is too long
    plain = name.replace("\\", "/")
    ends = [name, plain, unicodedata.normalize("NFC", plain), unicodedata.normalize("NFD", plain)]
    if by_end or _ELSEWHERE.match(plain):
        steps = [step for step in plain.split("/") if step not in ("", ".", "..")]
        last = 2 if what == "folder" else 1  # the shortest end: `images` may be the folder of another part
        ends += ["/".join(steps[first:]) for first in range(max(1, len(steps) - last + 1))]
    ends += [urllib.parse.unquote(end) for end in ends if "%" in end]
    ends = [end for end in dict.fromkeys(ends) if end]
    names = [[end] for end in ends]
    if what == "picture" and not plain.lower().endswith(PICTURE_SUFFIXES):
        suffixes = [case(suffix) for suffix in PICTURE_SUFFIXES for case in (str, str.upper)]
        names += [[end + suffix for suffix in suffixes] for end in ends]
    for same, folder in itertools.product(names, folders):
        files = [folder / each for each in same if there(folder / each)]
        found = {file.stat().st_ino: file for file in files}  # .jpg is .JPG in some file systems
        if len(found) > 1:
            return f"{' and '.join(map(str, files))} may each be the {what} {name!r}; give its suffix"
        if found:
            return files[0]
    file = folders[0] / plain
    with contextlib.suppress(OSError):
        if similar := [each for each in file.parent.iterdir() if each.name.lower() == file.name.lower()]:
            return f"there is no {what} {file}; its name in the folder is {similar[0].name}"
    return f"there is no {what} {file}"


def read_text(file: Path) -> str:
    """The text of a file in UTF-8, UTF-16, or UTF-32 with a byte order mark. Raises OSError, or ValueError with line,
    value and remedy."""
    data = file.read_bytes()
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # begins as UTF-16's
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    encoding = next((encoding for mark, encoding in marks.items() if data.startswith(mark)), "utf-8-sig")
    if encoding == "utf-8-sig" and len(data) % 2 == 0 and b"\0" in data[:2]:  # without a mark; files begin with ASCII
        encoding = "utf-16-be" if data[:1] == b"\0" else "utf-16-le"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        before = data[: error.start].count(b"\n")
        value = data.split(b"\n")[before].decode("cp1252", "replace").strip()
        raise ValueError(
            f"{file}, line {before + 1}: {value[:_SHOWN]!r} (read as cp1252) is not UTF-8; save it as UTF-8, in a "
            f"spreadsheet as 'CSV UTF-8', or convert it: iconv -f cp1252 -t utf-8 {file.name} > utf8-{file.name}"
        ) from error


@dataclasses.dataclass(frozen=True)
class Clip(Frames):
    """Frames from `start_s` to `end_s` of a video (None: its end), evenly in time; a short video repeats frames."""

    file: Path
    num_frames: int
    start_s: float = 0.0
    end_s: float | None = None

    def __len__(self) -> int:
        return self.num_frames

    def __iter__(self) -> Iterator[np.ndarray]:
        # Read in order: seeking is inexact in most containers.
        missing = list(self._times)
        try:
            for _, picture in frames_at(str(self.file), self._times):
                yield cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)
                del missing[0]
        except BadImage as error:
            raise ValueError(f"{self.file}: {error}") from error
        if missing:
            raise ValueError(f"{self.file}: the frame at {missing[0]:.2f} s is broken")

    def verify(self) -> FileInfo:
        try:
            with self.file.open("rb") as source:
                digest = hashlib.file_digest(source, "blake2b").hexdigest()
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {error.strerror}") from error
        return FileInfo(digest, [(frame.shape[1], frame.shape[0]) for frame in self][-1])

    @functools.cached_property
    def _times(self) -> list[float]:
        try:
            times = frame_times(str(self.file))
        except BadImage as error:
            raise ValueError(f"{self.file}: {error}") from error
        first = bisect.bisect_left(times, self.start_s - _ROUNDED_S)
        last = len(times) if self.end_s is None else bisect.bisect_left(times, self.end_s - _ROUNDED_S)
        if first >= last:
            end = "its end" if self.end_s is None else f"{self.end_s:g}"
            why = f"its duration is {_duration_s(times):.2f} s"
            if 0 < first < len(times):
                why = f"its frames next to these are at {times[first - 1]:.2f} and {times[first]:.2f} s"
            raise ValueError(f"{self.file} has no frame from second {self.start_s:g} to {end}; {why}")
        own = times[first:last]
        if self.num_frames == 1:
            return [own[bisect.bisect_right(own, (own[0] + own[0] + _duration_s(own)) / 2 + _ROUNDED_S) - 1]]
        step = (own[-1] - own[0]) / (self.num_frames - 1)
        return [_nearest(own, own[0] + number * step) for number in range(self.num_frames)]


def _duration_s(times: Sequence[float]) -> float:
    """From the first frame to the end of the last one, which is shown as long as frames are on average."""
    return (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)


def _nearest(times: Sequence[float], time_s: float) -> float:
    after = bisect.bisect_left(times, time_s)
    return min(times[max(0, after - 1) : after + 1], key=lambda each: abs(each - time_s))
