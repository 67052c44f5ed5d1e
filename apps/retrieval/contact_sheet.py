"""A contact sheet of the best clips, as a PNG: each with its rank, score, time, file and reasons."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.retrieval.ranking import Hit
from apps.video_analytics.sampling import spread
from vlora.errors import BadConfig
from vlora.opencv import cv2
from vlora.run_folder import write_whole, writing

_COLUMNS = 5
_CELL_WIDTH, _CELL_HEIGHT = 320, 200  # of the frames, without the lines of text below
_LINE = 22
_MARGIN = 10
_MOST_FRAMES = 4  # of one clip
_FONT, _SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.5
_INK, _FAINT, _PAPER = (30, 30, 30), (110, 110, 110), 250
_BAR = (120, 170, 60)


def write_sheet(path: Path, query: str, hits: Sequence[Hit], frames: Sequence[Sequence[bytes]]) -> None:
    """Write the sheet of these clips.

    Args:
        frames: of each clip, JPEG; none of a clip that is no longer in the index.

    Raises:
        BadConfig: the file is not named .png, or cannot be written.
    """
    check_sheet(path)
    encoded = cv2.imencode(".png", draw_sheet(query, hits, frames))[1].tobytes()
    with writing(path):
        write_whole(path, encoded, durable=False)


def check_sheet(path: Path) -> None:
    """Raises BadConfig for a name that does not end in .png, and for a folder that cannot be written to."""
    if path.suffix.lower() != ".png":
        raise BadConfig(f"--sheet is {str(path)!r}; the contact sheet is a PNG, so give a name that ends in .png")
    if not os.path.isdir(path.parent):
        raise BadConfig(f"cannot write {str(path)!r}: its folder does not exist; create it, or give another path")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise BadConfig(f"cannot write {str(path)!r}: permission denied; give another path")


def draw_sheet(query: str, hits: Sequence[Hit], frames: Sequence[Sequence[bytes]]) -> np.ndarray:
    """The sheet, BGR."""
    columns = max(1, min(_COLUMNS, len(hits)))
    rows = math.ceil(len(hits) / columns)
    width, height = _CELL_WIDTH + _MARGIN, _CELL_HEIGHT + 3 * _LINE + _MARGIN
    sheet = np.full((rows * height + _LINE + 2 * _MARGIN, columns * width + _MARGIN, 3), _PAPER, np.uint8)
    _write(sheet, query, (_MARGIN, _MARGIN), sheet.shape[1] - 2 * _MARGIN, _INK, 0.65)
    for place, (hit, own) in enumerate(zip(hits, frames, strict=True)):
        left = _MARGIN + place % columns * width
        top = _LINE + 2 * _MARGIN + place // columns * height
        if own:
            _draw_frames(sheet[top : top + _CELL_HEIGHT, left : left + _CELL_WIDTH], own)
        below = top + _CELL_HEIGHT
        cv2.rectangle(sheet, (left, below), (left + round(_CELL_WIDTH * hit.score), below + 3), _BAR, -1)
        time = "" if not hit.seconds else f"   {clock(hit.start_s)} - {clock(hit.start_s + hit.seconds)}"
        lines = f"{hit.rank}   {hit.score:.2f}{time}", Path(hit.source).name, hit.why()
        for number, (line, ink) in enumerate(zip(lines, (_INK, _FAINT, _INK), strict=True)):
            _write(sheet, line, (left, below + 5 + number * (_LINE - 4)), _CELL_WIDTH, ink)
    return sheet


def clock(seconds: float) -> str:
    """A time in a video: 1:02:03.5, or 2:03.5 within the first hour."""
    tenths = round(seconds * 10)
    hours, minutes, rest = tenths // 36000, tenths // 600 % 60, tenths % 600 / 10
    return f"{hours}:{minutes:02}:{rest:04.1f}" if hours else f"{minutes}:{rest:04.1f}"


def _draw_frames(cell: np.ndarray, frames: Sequence[bytes]) -> None:
    """Draw frames into a cell in reading order, in the grid that shows them largest."""
    chosen = [frames[place] for place in spread(min(_MOST_FRAMES, len(frames)), len(frames))]
    pictures = [cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR) for jpeg in chosen]
    first = pictures[0]
    assert first is not None, "the index has encoded it"

    def scale_in(columns: int) -> float:
        rows = math.ceil(len(chosen) / columns)
        return min(cell.shape[1] / columns / first.shape[1], cell.shape[0] / rows / first.shape[0])

    columns = max(range(1, len(chosen) + 1), key=scale_in)
    scale = scale_in(columns)
    size = max(1, int(first.shape[1] * scale) - 2), max(1, int(first.shape[0] * scale) - 2)
    left = (cell.shape[1] - columns * (size[0] + 2)) // 2
    for place, picture in enumerate(pictures):
        assert picture is not None, "the index has encoded it"
        picture = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
        x, y = left + place % columns * (size[0] + 2), place // columns * (size[1] + 2)
        cell[y : y + size[1], x : x + size[0]] = picture


def _write(
    sheet: np.ndarray, text: str, corner: tuple[int, int], width: int, ink: tuple[int, int, int], scale: float = _SCALE
) -> None:
    """Write one line below a corner, shortened to fit a width. OpenCV's fonts are ASCII."""
    shown = text = text.encode("ascii", "replace").decode()
    while len(shown) > 4 and cv2.getTextSize(shown, _FONT, scale, 1)[0][0] > width:
        text = text[:-1]
        shown = text + "..."
    cv2.putText(sheet, shown, (corner[0], corner[1] + 14), _FONT, scale, ink, 1, cv2.LINE_AA)
