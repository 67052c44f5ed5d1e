"""Frames by the clock: files with frames of different durations, and cameras that declare another rate than they have.

The grey level of each frame is its second.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from apps.retrieval.media import Media, read_media
from apps.video_analytics import AnnotatedVideo, Chunk, ClipShape, Source, annotate, find_sources, read_clips
from fusion.data.frames import Clip
from tests.apps.moving_objects import clip_result
from tests.apps.test_video_analytics import file_source
from vlora import opencv
from vlora.errors import BadImage

STEADY = [number / 30 for number in range(300)]
NIGHT = [number / 30 for number in range(60)] + [2 + number / 5 for number in range(40)]  # 30 per second, then 5
LOST = [number / 30 for number in range(60)] + [7 + number / 30 for number in range(90)]
SLIDES = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0, 9.5]


def picture(second: float) -> bytes:
    grey = np.full((48, 64, 3), min(245, 20 * int(second + 1e-6) + 5), np.uint8)
    return cv2.imencode(".jpg", grey)[1].tobytes()


def second_of(grey: Any) -> int:
    return round((float(np.mean(grey)) - 5) / 20)


def seconds(frames: Sequence[bytes]) -> list[int]:
    return [second_of(Image.open(io.BytesIO(frame))) for frame in frames]


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


FILES = [
    ("steady.mkv", STEADY, 0.0),
    ("night.mkv", NIGHT, 0.0),
    ("night.mp4", NIGHT, 0.0),
    ("late.mkv", NIGHT, 5.0),  # its first time stamp is 5 s
    ("edited.mp4", NIGHT, 5.0),  # with an edit list
    ("lost.mkv", LOST, 0.0),
    ("lost.mp4", LOST, 0.0),
    ("slides.gif", SLIDES, 0.0),
]


@pytest.mark.parametrize(("name", "times", "start_s"), FILES, ids=[name for name, _, _ in FILES])
def test_files_are_read_by_their_time_stamps(tmp_path: Path, name: str, times: list[float], start_s: float) -> None:
    """As clips of three shapes, for an index, and for training."""
    path = write_times(tmp_path / name, times, start_s)
    there = sorted({int(at + 1e-6) for at in times})
    shapes = [ClipShape(1), ClipShape(2)] + [ClipShape(2, 2)] * (name != "slides.gif")  # which declares 0.9
    clips = list(read_clips(file_source(path), shapes, shown=True))
    for head in range(len(shapes)):
        own = [clip for place, clip in clips if place == head]
        assert [clip.start_s for clip in own] == pytest.approx(there, abs=0.02)
        assert [seconds(clip.frames) for clip in own] == [[second] * shapes[head].num_frames for second in there]
    for _, clip in clips:
        at = [second_of(Image.open(io.BytesIO(each))) for each in clip.shown]
        assert at == [int(clip.start_s + since_s + 0.02) for since_s in clip.shown_s], "each picture has its time"
    indexed = list(read_media(Media(path, "video"), ClipShape(1), 640, threading.Event(), print))
    assert [second_of(Image.open(io.BytesIO(clip.frames[0]))) for clip in indexed] == there
    for second in there:
        assert [second_of(frame) for frame in Clip(path, 2, second, second + 1)] == [second] * 2
    assert [second_of(frame) for frame in Clip(path, 3)][::2] == [0, 9]
    for second in sorted(set(range(10)) - set(there)):
        with pytest.raises(ValueError, match=rf"has no frame from second {second} to {second + 1}; its frames next"):
            list(Clip(path, 2, second, second + 1))
    with pytest.raises(ValueError, match=r"has no frame from second 11 to its end; its duration is (9|10|11)\.\d\d s"):
        list(Clip(path, 2, 11))


class Capture:
    """Frames with these time stamps, which arrive when the clock says so."""

    def __init__(self, frames: Sequence[tuple[float, float]], rate: float, fourcc: str, count: int) -> None:
        self._frames = iter(frames)
        self._stamp_s = 0.0
        self.now = 100.0
        self._known = {cv2.CAP_PROP_FPS: rate, cv2.CAP_PROP_FRAME_COUNT: count}
        self._known[cv2.CAP_PROP_FOURCC] = cv2.VideoWriter.fourcc(*fourcc)

    def __call__(self, address: Any) -> Capture:
        return self

    def clock(self) -> float:
        return self.now

    def isOpened(self) -> bool:
        return True

    def get(self, name: int) -> float:
        return 1e3 * self._stamp_s if name == cv2.CAP_PROP_POS_MSEC else self._known[name]

    def grab(self) -> bool:
        arrives, self._stamp_s = next(self._frames, (-1.0, 0.0))
        self.now = 100.0 + arrives
        return arrives >= 0

    def release(self) -> None: ...


NOW = range(6)
CAMERAS: dict[str, tuple[list[float], list[float], str, int, list[float]]] = {
    # arrival, time stamp, codec, declared number of frames, the right times
    "a file over HTTP": ([0.1, 0.1, 0.1, 93.2], [7, 8, 9, 10], "h264", 300, [0.1, 1.1, 2.1, 3.1]),
    "stamps of the camera": ([0.1, 1.4, 2.1, 3.3], [7, 8, 9, 10], "h264", 0, [0.1, 1.1, 2.1, 3.1]),
    "frames that waited": ([1.1, 1.1, 1.1, 2.1], [7, 7.5, 8, 9], "h264", 0, [1.1, 1.1, 1.1, 2.1]),
    "MJPEG over RTSP": ([0.5, 0.7, 0.8, 0.8], [5, 5.1, 5.2, 5.3], "MJPG", 0, [0.5, 0.6, 0.7, 0.8]),
    "MJPEG over HTTP": ([0.5, 0.6, 0.7, 0.8], [0, 0.04, 0.08, 0.12], "MJPG", 0, [0.5, 0.6, 0.7, 0.8]),
    "no stamps": ([0.5, 0.6, 0.7, 0.8], [0, 0, 0, 0], "h264", -1, [0.5, 0.6, 0.7, 0.8]),
    "a stall": ([0, 0.1, 10.1, 10.2], [5, 5.1, 15.1, 15.2], "h264", 0, [0, 0.1, 10.1, 10.2]),
    "a burst after a long stall": ([0, 40, 40, 40.1], [5, 5.1, 45, 45.1], "h264", 0, [0, 0.1, 40, 40.1]),
    "a burst after a stall": ([0, 10, 10, 10, 10.1], [5, 5.1, 9, 14.9, 15.1], "h264", 0, [0, 0.1, 4, 9.9, 10.1]),
    "started again": ([0, 1, 2, 3], [50, 51, 0.1, 1.1], "h264", 0, [0, 1, 2, 3]),
    "a camera clock that is set": ([0, 1, 2, 3], [50, 51, 9052, 9053], "h264", 0, [0, 1, 2, 3]),
    "stamps too slow": ([0, 100, 200, 300], [1, 11, 21, 31], "h264", 0, [0, 10, 200, 210]),
}


@pytest.mark.parametrize(("arrivals", "stamps", "fourcc", "count", "right"), CAMERAS.values(), ids=list(CAMERAS))
def test_frames_of_a_camera_have_their_own_times_or_those_of_their_arrival(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    arrivals: list[float],
    stamps: list[float],
    fourcc: str,
    count: int,
    right: list[float],
) -> None:
    capture = Capture(list(zip(arrivals, stamps, strict=True)), 25.0, fourcc, count)
    monkeypatch.setattr(cv2, "VideoCapture", capture)
    monkeypatch.setattr(opencv, "clock", capture.clock)
    address = "http://camera" if "HTTP" in request.node.name else "rtsp://camera"
    with opencv.Video(address, since=100.0) as video:
        skipped = {"frames that waited": 3}.get(request.node.callspec.id, int("HTTP" not in request.node.name))
        assert list(video) == pytest.approx(right[skipped:], abs=0.03)


@pytest.mark.parametrize(
    ("rate", "stamps", "right"),
    [
        (25.0, [0, 0, 0, 0], [0, 0.04, 0.08, 0.12]),  # none, as in raw H.264
        (0.0, [0, 0, 0, 0], [0, 0.033333, 0.066667, 0.1]),
        (10.0, [0, 0.1, 0, 0.3], [0, 0.1, 0.2, 0.3]),  # one is missing
        (10.0, [0, 0.1, 0.1, 0.2], [0, 0.1, 0.1, 0.2]),  # twice
        (10.0, [0, 0.2, 0.1, 0.3], [0, 0.2, 0.2, 0.3]),  # out of order
        (10.0, [0, 5, 0, 0.1, 0.2], [0, 5, 5.1, 5.2, 5.3]),  # joined files
        (10.0, [-0.1, 0.1, 0.2], [0, 0.2, 0.3]),
        (10.0, [3, 3.1, 8], [0, 0.1, 5]),
    ],
)
def test_time_stamps_of_files_that_are_missing_or_not_in_order(
    monkeypatch: pytest.MonkeyPatch, rate: float, stamps: list[float], right: list[float]
) -> None:
    monkeypatch.setattr(cv2, "VideoCapture", Capture([(0, stamp) for stamp in stamps], rate, "h264", len(stamps)))
    with opencv.Video("file.mp4") as video:
        assert list(video) == pytest.approx(right)


def test_a_truncated_file_has_the_clips_up_to_its_end_and_a_picture_is_one(tmp_path: Path) -> None:
    whole = write_times(tmp_path / "whole.mkv", NIGHT).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    clips = [clip for _, clip in read_clips(file_source(tmp_path / "cut.mkv"), [ClipShape(1)])]
    assert 1 < len(clips) < 9
    assert [seconds(clip.frames) for clip in clips] == [[round(clip.start_s)] for clip in clips]
    (tmp_path / "cut.mp4").write_bytes(write_times(tmp_path / "whole.mp4", NIGHT).read_bytes()[:2000])
    for name, text in (("cut.mp4", None), ("tone.wav", b"RIFF")):
        if text:
            sound = struct.pack(
                "<4sI4s4sIHHIIHH4sI", text, 836, b"WAVE", b"fmt ", 16, 1, 1, 8000, 8000, 1, 8, b"data", 800
            )
            (tmp_path / name).write_bytes(sound + bytes(800))
        with pytest.raises(BadImage, match="is not a video that this machine can decode"):
            list(read_clips(file_source(tmp_path / name), [ClipShape(1)]))
        with pytest.raises(ValueError, match="is not a video that this machine can decode"):
            list(Clip(tmp_path / name, 1))
    for number in (1, 2):  # OpenCV would read photo1.jpg, photo2.jpg and so on as a video
        (tmp_path / f"photo{number}.jpg").write_bytes(picture(number))
    ((_, still),) = read_clips(file_source(tmp_path / "photo1.jpg"), [ClipShape(2)])
    assert seconds(still.frames) == [1, 1]


def test_a_video_turned_by_its_metadata_is_upright(tmp_path: Path) -> None:
    path = write_times(tmp_path / "turned.mp4", STEADY[:3])
    data = path.read_bytes()
    place = data.index(b"tkhd") + 44  # the matrix
    turned = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    path.write_bytes(data[:place] + turned + data[place + 36 :])
    ((_, clip),) = read_clips(file_source(path), [ClipShape(1)])
    assert Image.open(io.BytesIO(clip.frames[0])).size == (48, 64) and next(iter(Clip(path, 1))).shape == (64, 48, 3)


@pytest.mark.slow
def test_a_written_video_has_the_seconds_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap of seconds is shown as the last picture before it, one of hours as the longest one."""
    monkeypatch.setattr(annotate, "LONGEST_S", 4.0)
    for name, times, wanted in (
        ("night", NIGHT, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("lost", LOST, [0, 1, 1, 1, 1, 1, 7, 8, 9]),
        ("hours", [*STEADY[:30], *(7200 + at for at in STEADY[:30])], [0] * 5 + [12]),
    ):
        video = AnnotatedVideo(tmp_path / name)
        source = file_source(write_times(tmp_path / f"{name}.mkv", times))
        for _, clip in read_clips(source, [ClipShape(1)], shown=True):
            video.add(clip, clip_result(None, clip.index, clip.start_s))
        video.close()
        capture = cv2.VideoCapture(str(tmp_path / f"{name}.webm"))
        rate, found = capture.get(cv2.CAP_PROP_FPS), []
        while capture.grab():
            _, frame = capture.retrieve()
            found.append(second_of(frame[:100, :100]))
        assert len(found) == pytest.approx(len(wanted) * rate, abs=2)
        middles = found[int(rate / 2) :: int(rate)]
        assert middles == wanted


Frames = Callable[[float], Iterator[float]]
"""For a connection that begins at this time of the camera's clock: how long to wait before each of its frames."""


@contextlib.contextmanager
def camera(frames: Frames) -> Iterator[Source]:
    """MJPEG over HTTP, for which OpenCV declares 25 frames per second. The grey level is 10 x its clock + 5."""
    began = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *values: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            with contextlib.suppress(OSError):
                for wait_s in frames(time.monotonic() - began):
                    time.sleep(wait_s)
                    data = picture((time.monotonic() - began) / 2)
                    head = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data)
                    self.wfile.write(head + data + b"\r\n")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (source,) = find_sources([f"http://127.0.0.1:{server.server_port}/"])
        yield source
    finally:
        server.shutdown()
        server.server_close()


def watch(source: Source, shapes: Sequence[ClipShape], until_s: float) -> tuple[list[list[Chunk]], list[str]]:
    """The clips by shape, and what is reported."""
    stop, lines = threading.Event(), list[str]()
    clips: list[list[Chunk]] = [[] for _ in shapes]
    began = time.monotonic()
    for head, clip in read_clips(source, shapes, stop=stop, shown=True, say=lines.append):
        clips[head].append(clip)
        if time.monotonic() - began > until_s:
            stop.set()
    return clips, lines


@pytest.mark.slow
def test_a_camera_is_answered_by_the_clock() -> None:
    """Ten frames per second, after a second twenty."""

    def frames(began_s: float) -> Iterator[float]:
        yield from itertools.repeat(0.1, 10)
        yield from itertools.repeat(0.05)

    with camera(frames) as source:
        (seconds_long, twice), lines = watch(source, [ClipShape(1), ClipShape(1, 2)], 2.8)
    assert not lines and 2 <= len(seconds_long) <= 3 and 4 <= len(twice) <= 7
    assert seconds_long[1].start_s - seconds_long[0].start_s == pytest.approx(1, abs=0.2)
    assert [clip.start_s - twice[0].start_s for clip in twice] == pytest.approx([n / 2 for n in range(len(twice))])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_camera_that_stalls_and_ends_and_comes_back_keeps_the_time(tmp_path: Path) -> None:
    def frames(began_s: float) -> Iterator[float]:
        if began_s > 5:
            yield from itertools.repeat(0.05)
        yield from itertools.repeat(0.1, 20)
        yield 10.0
        yield from itertools.repeat(0.2, 15)  # at night

    with camera(frames) as source:
        ((*clips,),), lines = watch(source, [ClipShape(1)], 18.5)
    video = AnnotatedVideo(tmp_path / "camera")
    for clip in clips:
        video.add(clip, clip_result(None, clip.index, clip.start_s))
        for encoded, since_s in zip(clip.shown, clip.shown_s, strict=True):
            assert 2 * second_of(Image.open(io.BytesIO(encoded))) == pytest.approx(clip.start_s + since_s, abs=2.2)
    video.close()
    assert [round(clip.start_s) for clip in clips][:5] == [0, 1, 12, 13, 14] and clips[-1].start_s > 16.5
    assert len(lines) == 1 and "the camera sends no more frames; retrying in 1 s" in lines[0]
    capture = cv2.VideoCapture(str(tmp_path / "camera.webm"))
    assert capture.get(cv2.CAP_PROP_FRAME_COUNT) == pytest.approx(10 * (clips[-1].start_s + 1), abs=10)
