"""A real camera: pictures with a clock over RTSP, which changes its rate, freezes, stalls, and closes connections."""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apps.video_analytics import ClipShape, find_sources, read_clips

CAMERA = Path(__file__).with_name("rtsp_camera.py")
PYTHON = "/usr/bin/python3"
"""Debian's, for which GStreamer's bindings are packaged (`.ci/run`)."""
PHASES = ("send:25:3", "send:5:2", "freeze:25:1", "stall:25:2", "send:25:1", "drop:25:0.2", "send:10:6")


def has_gstreamer() -> bool:
    needs = "import gi; gi.require_version('GstRtspServer', '1.0'); from gi.repository import GstRtspServer"
    try:
        return subprocess.run([PYTHON, "-c", needs], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_gstreamer(), reason="needs GStreamer's RTSP server")]


@contextlib.contextmanager
def camera(codec: str) -> Iterator[str]:
    """The address of a camera."""
    with subprocess.Popen([PYTHON, str(CAMERA), codec, *PHASES], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def clock_of(jpeg: bytes) -> float:
    """The value of `time.monotonic`, in seconds, when a picture of `rtsp_camera.py` was taken."""
    picture = np.asarray(Image.open(io.BytesIO(jpeg)).convert("L"))
    levels = picture.reshape(5, 16, 8, 16).mean(axis=(1, 3)).ravel()  # of blocks of 16 x 16
    return sum(1 << place for place, level in enumerate(levels) if level > 127) / 1e3


@pytest.mark.parametrize("codec", ["h264", pytest.param("mjpeg", marks=pytest.mark.exhaustive)])
def test_frames_have_the_times_of_the_camera_s_clock(codec: str) -> None:
    """At each rate, while it freezes, after a stall, and on the next connection: within half an interval, also where a
    picture is passed on when the next one arrives.
    """
    said: list[str] = []
    stop = threading.Event()
    rows: list[tuple[float, float]] = []  # when by our time, when by the picture's clock
    epoch = time.time() - time.monotonic()
    with camera(codec) as address:
        (source,) = find_sources([address])
        for _, clip in read_clips(source, [ClipShape(1)], stop=stop, shown=True, say=said.append):
            pictures = zip(clip.shown_s, clip.shown, strict=True)
            rows += [(clip.utc(clip.start_s + s).timestamp() - epoch, clock_of(jpeg)) for s, jpeg in pictures]
            if rows[-1][1] > rows[0][1] + 12:
                stop.set()
    assert len(said) == 1 and "the camera sends no more frames; retrying in 1 s" in said[0]
    frozen = [rows[place] for place in range(1, len(rows)) if rows[place][1] == rows[place - 1][1]]
    assert frozen and 0.5 < frozen[-1][0] - frozen[0][0] < 1.1
    moving = [row for row in rows if row not in frozen]
    lost = max(range(1, len(moving)), key=lambda place: moving[place][0] - moving[place - 1][0])
    for connection in (moving[:lost], moving[lost:]):
        assert len(connection) > 5 and all(one[0] < other[0] for one, other in itertools.pairwise(connection))
        delays = [time_s - taken_s for time_s, taken_s in connection]
        usual = statistics.median(delays)
        differences = sorted(abs(delay - usual) for delay in delays)
        # Until a picture has travelled without other load, all are late by as much as the fastest one was.
        assert 0 <= usual < 0.04 and differences[len(delays) * 3 // 4] < 0.02 and differences[-1] < 0.5
    assert any(other[0] - one[0] > 2 for one, other in itertools.pairwise(moving[:lost])), "the stall"
