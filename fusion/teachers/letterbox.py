"""Pictures to the inputs of detectors: letterboxed as YOLO models are trained, or stretched; and boxes back again."""

from __future__ import annotations

import dataclasses
from typing import Literal

import cv2
import numpy as np

_PADDING = 114  # grey level of the border that Ultralytics trains with

Resize = Literal["letterbox", "stretch"]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A picture within a model's input. left, top, width, height: its edges there, in pixels; the rest is padding."""

    pixels: np.ndarray
    left: int
    top: int
    width: int
    height: int

    def shares(self, boxes: np.ndarray) -> np.ndarray:
        """Edges [n, 4] (left, top, right, bottom) in pixels of the input, as shares of the picture."""
        return (boxes - [self.left, self.top] * 2) / ([self.width, self.height] * 2)


def place(frame: np.ndarray, height: int, width: int, resize: Resize) -> Placed:
    """Resize an RGB picture [h, w, 3] to [height, width, 3].

    "letterbox" keeps the aspect ratio and centres the picture between grey borders. "stretch" does not.
    """
    rows, columns = frame.shape[:2]
    if resize == "stretch":
        return Placed(_resized(frame, height, width), 0, 0, width, height)
    scale = min(height / rows, width / columns)
    inner_height, inner_width = (max(1, round(extent * scale)) for extent in (rows, columns))
    # Of an odd border, the larger half is at the bottom and on the right.
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    canvas = np.full((height, width, 3), _PADDING, np.uint8)
    canvas[top : top + inner_height, left : left + inner_width] = _resized(frame, inner_height, inner_width)
    return Placed(canvas, left, top, inner_width, inner_height)


def _resized(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    if frame.shape[:2] == (height, width):
        return frame
    return cv2.resize(frame, (width, height), interpolation=cv2.INTER_LINEAR)
