"""Draw a stream's answers on its video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apps.opencv import cv2
from apps.video_analytics import CHUNK_S, FALLBACK_FPS, ChunkResult
from vlora.errors import BadImage

_WIDTH = 480  # small videos are enlarged, so that text is readable
_BAR = 48  # pixels below the picture


def annotate(video: Path, out: Path, results: Sequence[ChunkResult]) -> None:
    """Write `video` to `out` (mp4) with each chunk's label, confidence and latency below the picture.

    Raises BadImage when the video cannot be read or written.
    """
    capture = cv2.VideoCapture(str(video))
    fps = capture.get(cv2.CAP_PROP_FPS) or FALLBACK_FPS
    size = tuple(int(capture.get(prop)) for prop in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    if not all(size):
        raise BadImage(f"cannot read video {str(video)!r}")
    scale = max(1, round(_WIDTH / size[0]))
    writer = cv2.VideoWriter(str(out), cv2.VideoWriter.fourcc(*"mp4v"), fps, (size[0] * scale, size[1] * scale + _BAR))
    if not writer.isOpened():
        raise BadImage(f"cannot write video {str(out)!r}")
    place = 0
    while True:
        read, frame = capture.read()
        chunk = int(place / fps / CHUNK_S)
        if not read or chunk >= len(results):
            break
        writer.write(_drawn(frame, scale, results[chunk]))
        place += 1
    writer.release()
    capture.release()


def _drawn(frame: cv2.typing.MatLike, scale: int, result: ChunkResult) -> cv2.typing.MatLike:
    picture = cv2.resize(frame, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)
    drawn = cv2.copyMakeBorder(picture, 0, _BAR, 0, 0, cv2.BORDER_CONSTANT, value=(0, 0, 0))
    text = f"{result.label}  {result.confidence:.0%}  {result.latency_s * 1e3:.0f} ms"
    cv2.putText(drawn, text, (10, drawn.shape[0] - 16), cv2.FONT_HERSHEY_SIMPLEX, 0.7, (255, 255, 255), 1, cv2.LINE_AA)
    return drawn
