"""Moves boxes from one frame to the next with the pictures' own motion (sparse Lucas-Kanade flow of OpenCV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vlora.opencv import cv2

Grey = npt.NDArray[np.uint8]
"""A grey picture [height, width]."""

_MOST_POINTS = 40  # of a box
_QUALITY = 0.02
_DISTANCE = 2.0  # pixels between points
_WINDOW = (15, 15)
_LEVELS = 3  # of the pyramid: motion of up to about 60 pixels per frame
_RETURN_ERROR = 1.0  # pixels between a point and its way forth and back
_FEWEST_POINTS = 3


class Edges(NamedTuple):
    """A box, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def moved(self, x: float, y: float) -> Edges:
        return Edges(self.left + x, self.top + y, self.right + x, self.bottom + y)


def move(before: Grey, now: Grey, boxes: Sequence[Edges]) -> list[Edges | None]:
    """The boxes of `before`, moved by the median motion of the corners inside each. Their sizes do not change.

    Args:
        before, now: two consecutive frames of the same size.

    Returns:
        None for a box without enough corners that are found in both frames.
    """
    corners = [_corners(before, box) for box in boxes]
    points = np.concatenate([*corners, np.empty((0, 2), np.float32)])
    if not len(points):
        return [None] * len(boxes)
    there, found_there = _follow(before, now, points)
    back, found_back = _follow(now, before, there)
    kept = found_there & found_back & (np.abs(back - points).max(axis=1) < _RETURN_ERROR)
    motion = there - points
    moved: list[Edges | None] = []
    first = 0
    for box, own in zip(boxes, corners, strict=True):
        part = slice(first, first := first + len(own))
        sound = motion[part][kept[part]]
        if len(sound) < _FEWEST_POINTS:
            moved.append(None)
        else:
            x, y = np.median(sound, axis=0)
            moved.append(box.moved(float(x), float(y)))
    return moved


def _corners(picture: Grey, box: Edges) -> npt.NDArray[np.float32]:
    """Points [count, 2] inside a box that can be found again."""
    height, width = picture.shape
    left, top = max(0, round(box.left)), max(0, round(box.top))
    right, bottom = min(width, round(box.right)), min(height, round(box.bottom))
    nothing = np.empty((0, 2), np.float32)
    if right - left < 4 or bottom - top < 4:
        return nothing
    found = cv2.goodFeaturesToTrack(picture[top:bottom, left:right], _MOST_POINTS, _QUALITY, _DISTANCE)
    if found is None:
        return nothing
    corner = np.array([left, top], np.float32)
    return found.reshape(-1, 2).astype(np.float32) + corner


def _follow(
    before: Grey, now: Grey, points: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    there, found, _ = cv2.calcOpticalFlowPyrLK(
        before,
        now,
        points.reshape(-1, 1, 2),
        np.empty_like(points).reshape(-1, 1, 2),  # without flags, its values are not read
        winSize=_WINDOW,
        maxLevel=_LEVELS,
    )
    return there.reshape(-1, 2).astype(np.float32), found.reshape(-1).astype(bool)
