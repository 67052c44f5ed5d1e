"""Video files for tests, with pictures of one brightness per second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from vlora import opencv

NIGHT = [number / 30 for number in range(60)] + [2 + number / 5 for number in range(40)]  # 30 per second, then 5


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


def picture(second: float) -> bytes:
    grey = np.full((48, 64, 3), min(245, 20 * int(second + 1e-6) + 5), np.uint8)
    return cv2.imencode(".jpg", grey)[1].tobytes()


def write_times(path: Path, times: Sequence[float], start_s: float = 0.0) -> Path:
    """A file of JPEG frames with these time stamps, rounded to milliseconds."""
    if path.suffix == ".gif":
        shown = [Image.fromarray(np.full((48, 64), 20 * int(at + 1e-6) + 5, np.uint8)) for at in times]
        shown = [each.convert("RGB") for each in shown]
        for number, each in enumerate(shown):
            each.putpixel((0, 0), (number, 0, 0))  # Pillow joins equal frames
        lasts = [round(1e3 * (after - at)) for at, after in zip(times, [*times[1:], times[-1] + 0.5], strict=True)]
        shown[0].save(path, save_all=True, append_images=shown[1:], duration=lasts)
        return path
    writer = cv2.VideoWriter()
    raw = [cv2.VIDEOWRITER_PROP_RAW_VIDEO, 1]
    with opencv.quiet():
        assert writer.open(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*"MJPG"), 1000, (64, 48), raw)
    for at in times:
        writer.set(cv2.VIDEOWRITER_PROP_PTS, round(1e3 * (start_s + at)))
        writer.write(np.frombuffer(picture(at), np.uint8).reshape(1, -1))
    writer.release()
    return path
