"""Video files for tests, with pictures of one brightness per second."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np


def write_video(path: Path, shades: list[int], fps: int = 10, size: tuple[int, int] = (64, 48), rest: int = 0) -> Path:
    """Write a video with one second of each brightness, and further frames of the last one."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, size)
    for place, shade in enumerate(shades, 1):
        for _ in range(fps + rest * (place == len(shades))):
            writer.write(np.full((size[1], size[0], 3), shade, np.uint8))
    writer.release()
    return path


def shades(count: int) -> list[int]:
    """Brightness by second: bright in every third second, dark otherwise."""
    return [20 if place % 3 else 230 for place in range(count)]
