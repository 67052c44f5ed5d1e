"""The process that decodes a video of a request: a broken file may crash a decoder, or take all memory.

Its argument is a `DecodeVideo`, its input the file. It writes a line with a `FrameReport` for each frame, followed by
the pixels, and a last one.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from vlora.errors import BadImage, TooLarge, VLoraError
from vlora.opencv import cv2, frame_times, frames_at
from vlora.types.output import ErrorValue
from vlora.types.video import DecodeVideo, FrameReport

_FILE = "/dev/stdin"
_MEMORY_BYTES = 4 * 2**30


def _decode(asked: DecodeVideo) -> None:
    times = frame_times(_FILE)
    if times[-1] > asked.max_s:
        raise TooLarge(f"it lasts {times[-1]:.1f} s; this server takes at most {asked.max_s:g}; send a part of it")
    chosen = asked.video.choose(times)
    if len(chosen) > asked.max_frames:
        room = f"this request has room for {max(0, asked.max_frames)}; send a lower fps, or num_frames"
        raise TooLarge(f"{len(chosen)} of its frames are asked for, and {room}")
    for time_s, picture in frames_at(_FILE, chosen):
        height, width = picture.shape[:2]
        if len(chosen) * height * width > asked.max_pixels:
            room = f"for {max(0, asked.max_pixels)} pixels; ask for fewer frames"
            raise TooLarge(f"it has {len(chosen)} frames of {width}x{height}, and this request has room {room}")
        _write(FrameReport(time_s, height, width), cv2.cvtColor(picture, cv2.COLOR_BGR2RGB).tobytes())


def _write(report: FrameReport, pixels: bytes = b"") -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n" + pixels)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        _decode(msgspec.json.decode(sys.argv[1], type=DecodeVideo))
        _write(FrameReport())
    except (MemoryError, cv2.error):
        _write(FrameReport(error=ErrorValue.of(BadImage("it cannot be decoded in the memory that a decoder may use"))))
    except VLoraError as error:
        _write(FrameReport(error=ErrorValue.of(error)))
