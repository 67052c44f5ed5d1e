"""Sources to clips: addresses, pictures, frames by the clock, clips of each rate, and cameras that are lost.

In videos by time stamps, the grey level of each frame is its second; in ramps, its index.
"""

from __future__ import annotations

import io
import itertools
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from apps.retrieval.media import Media, read_media
from apps.video_analytics import AnnotatedVideo, Chunk, ClipShape, Source, annotate, find_sources, read_clips
from apps.video_analytics import sources as sources_module
from apps.video_analytics.sampling import Frame, Sampler
from apps.video_analytics.source_reader import SourceReader
from apps.video_analytics.sources import read_picture
from fusion.data.frames import Clip
from tests.apps.scripted import clip_result, file_source, refuse_to_list
from tests.server.running import png
from tests.video_files import NIGHT, picture, write_times
from vlora import opencv
from vlora.config import ServerConfig
from vlora.errors import BadImage
from vlora.server.images import decode_images


def clips_of(source: Source, num_frames: int, fps: float | None = None, **options: Any) -> Iterator[Chunk]:
    """A source's clips for one head."""
    return (clip for _, clip in read_clips(source, [ClipShape(num_frames, fps)], **options))


# -- addresses --------------------------------------------------------------------------------------------------------


def test_addresses_become_sources_with_unique_names(tmp_path: Path) -> None:
    for name in ("b.mp4", "a.MP4", "notes.txt", ".hidden", "c.jfif", "still.gif", "moving.GIF", "d.m2ts"):
        (tmp_path / name).write_bytes(b"")
    frames = [Image.new("L", (8, 8), grey) for grey in (20, 230)]
    frames[0].save(tmp_path / "still.gif")
    frames[0].save(tmp_path / "moving.GIF", save_all=True, append_images=frames[1:])
    addresses = ("0", "rtsp://user:secret@camera-7:554/main?x=1", "x/street.mp4", "y/street.mp4", str(tmp_path))
    said: list[str] = []
    assert [(source.name, source.kind) for source in find_sources(addresses, said.append)] == [
        ("camera-0", "live"),
        ("camera-7-554-main-x-1", "live"),
        *((name, "file") for name in ("street", "street-2", "a", "b", "d", "moving")),
        (tmp_path.name, "pictures"),
    ]
    assert len(said) == 1 and "skipped notes.txt; only files ending in" in said[0]
    (gate := tmp_path / "gate").joinpath("old").mkdir(parents=True)
    (gate / "a.events").mkdir()
    results = ("a.jsonl", "a.webm", "a.events.jsonl", "a.events/0001-car.jpg")  # of an earlier run
    for name in ("a.mp4", "old/a.mp4", "old/1.png", *results):
        (gate / name).write_bytes(b"")
    assert [source.name for source in find_sources([str(tmp_path), str(gate / "a.mp4")])] == [
        *("a", "b", "d", "gate-a", "gate-old-a", "moving", tmp_path.name, "gate-old", "a-2"),
    ]
    (tmp_path / "empty").mkdir()
    for folder, why in (("gate/a.events", "results of `vlora stream` only"), ("empty", "no video and no picture")):
        with pytest.raises(BadImage, match=f"contains {why}"):
            find_sources([str(tmp_path / folder)])


def test_errors_name_why_a_source_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "20240101120001").mkdir()
    secret = "http://user:secret@127.0.0.1:9/main?user=u&Password=secret&channel=1&pwd=secret"
    assert find_sources([secret])[0].name == "127-0-0-1-9-main-user-u-channel-1"
    for address, why in (
        ("99", "no camera has that number"),
        ("20240101120000", "no camera has that number"),
        ("20240101120001", r"; write \./20240101120001 for the file or folder$"),
        ("rtsp://127.0.0.1:1/main", "the address does not respond"),
        (secret, r"'http://127\.0\.0\.1:9/main\?user=u&channel=1'"),  # without the passwords
        ("nowhere.mp4", "no such file or address"),
        ("nowhere.png", "'nowhere.png' does not exist"),
        (__file__, "not a video that this machine can decode"),
    ):
        with pytest.raises(BadImage, match=why):
            next(clips_of(find_sources([address])[0], 1))
    # OpenCV aborts the process for a name that is not UTF-8.
    (tmp_path / "pictures").mkdir()
    for path in (tmp_path / "\udcff.mp4", tmp_path / "pictures" / "\udcff.png"):
        path.write_bytes(png())
    with pytest.raises(BadImage, match="its name is not UTF-8; rename it"):
        next(clips_of(find_sources([str(tmp_path)])[0], 1))
    problem = next(clips_of(file_source(tmp_path / "pictures"), 1)).problem
    assert problem is not None and problem.endswith("its name is not UTF-8; rename it")
    refuse_to_list(tmp_path, monkeypatch)
    with pytest.raises(BadImage, match=r"cannot read folder '.*': Permission denied$"):
        find_sources([str(tmp_path)])


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_a_folders_pictures_are_chunks_of_as_many_as_the_head_reads(tmp_path: Path) -> None:
    for place in range(5):
        (tmp_path / f"{place}.png").write_bytes(png(40 * place))
    clips = list(read_clips(file_source(tmp_path), [ClipShape(2), ClipShape(1)], shown=True))
    pairs, singles = ([clip for place, clip in clips if place == head] for head in range(2))
    assert [(len(clip.frames), len(clip.shown)) for clip in pairs] == [(2, 2)] * 3
    assert pairs[2].frames[0] == pairs[2].frames[1], "the last is repeated"
    assert [clip.index for clip in singles] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "kind", ["RGBA.png", "RGBA.webp", "RGBA.tif", "LA.png", "P.png", "P.gif", "I;16.png", "I;16.tif", "RGBA;16.png"]
)
def test_pictures_have_the_pixels_that_the_server_decodes(tmp_path: Path, kind: str) -> None:
    mode, _, suffix = kind.partition(".")
    file = tmp_path / f"a.{suffix}"
    image = Image.new("RGBA", (8, 4), (200, 100, 50, 0))
    for place, alpha in enumerate((255, 128, 1)):
        image.putpixel((place, 0), (90, 60, 30, alpha))
    deep = np.linspace(0, 65535, 32).reshape(4, 8).astype(np.uint16)
    if mode == "RGBA;16":
        cv2.imwrite(str(file), cv2.cvtColor(np.asarray(image).astype(np.uint16) * 257, cv2.COLOR_RGBA2BGRA))
    elif mode == "I;16":
        Image.fromarray(deep).save(file)
    else:
        options: dict[str, Any] = {"lossless": True, "exact": True} if suffix == "webp" else {}
        (image.quantize(8) if mode == "P" else image.convert(mode)).save(file, **options)
    (served,) = decode_images([file.read_bytes()], ServerConfig())
    read = read_picture(file)[..., ::-1].astype(int)
    assert np.abs(read - np.asarray(served)).max() <= 1
    if mode == "I;16":
        assert np.abs(read - (deep / 257)[..., None]).max() <= 1


def test_pictures_that_opencv_would_show_wrongly_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)).save(tmp_path / "a.tif")
    exif = Image.Exif()
    exif[0x0112] = 3
    image = Image.new("RGBA", (8, 4), (200, 100, 50, 0))
    image.putpixel((0, 0), (0, 0, 0, 255))
    image.save(tmp_path / "a.png", exif=exif)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    for name, why in (
        ("a.tif", r"a\.tif' has samples of type float32; convert it to 8 or 16 bits"),
        ("a.png", r"a\.png' is transparent and rotated by EXIF; save it upright"),
        ("huge.png", r"huge\.png': OpenCV requires pixels <= \w+$"),
    ):
        with pytest.raises(BadImage, match=why):
            read_picture(tmp_path / name)


# -- frames by the clock ----------------------------------------------------------------------------------------------

STEADY = [number / 30 for number in range(300)]
LOST = [number / 30 for number in range(60)] + [7 + number / 30 for number in range(90)]
SLIDES = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0, 9.5]


def second_of(grey: Any) -> int:
    return round((float(np.mean(grey)) - 5) / 20)


def seconds(frames: Sequence[bytes]) -> list[int]:
    return [second_of(Image.open(io.BytesIO(frame))) for frame in frames]


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

    def __call__(self, address: Any, *options: Any) -> Capture:
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

    def retrieve(self) -> tuple[bool, np.ndarray]:
        return True, np.full((48, 64, 3), 10 * int(self.now - 100 + 1e-6) + 5, np.uint8)

    def release(self) -> None: ...


CAMERAS: dict[str, tuple[list[float], list[float], str, int, list[float]]] = {
    # arrival, time stamp, codec, declared number of frames, the right times
    "a file over HTTP": ([0.1, 0.1, 0.1, 93.2], [7, 8, 9, 10], "h264", 300, [0.1, 1.1, 2.1, 3.1]),
    "stamps of the camera": ([0.1, 1.4, 2.1, 3.3], [7, 8, 9, 10], "VP80", 0, [0.1, 1.1, 2.1, 3.1]),
    "H.264, passed on a frame later": ([0.2, 0.6, 1.1, 1.6], [7, 7.5, 8, 8.5], "h264", 0, [0.2, 0.2, 0.6, 1.1]),
    "H.264 of another reader": ([0.1, 0.2, 10.2, 10.3], [5, 5.1, 15.1, 15.2], "h264", 0, [0.1, 0.1, 10.1, 10.2]),
    "H.265 at night": ([0.14, 0.18, 0.38, 0.58], [7, 7.04, 7.08, 7.28], "hevc", 0, [0.1, 0.14, 0.18, 0.38]),
    "frames that waited": ([1.1, 1.1, 1.1, 2.1], [7, 7.5, 8, 9], "VP80", 0, [1.1, 1.1, 1.1, 2.1]),
    "MJPEG over RTSP": ([0.5, 0.7, 0.8, 0.8], [5, 5.1, 5.2, 5.3], "MJPG", 0, [0.5, 0.6, 0.7, 0.8]),
    "MJPEG over HTTP": ([0.5, 0.6, 0.7, 0.8], [0, 0.04, 0.08, 0.12], "MJPG", 0, [0.5, 0.6, 0.7, 0.8]),
    "no stamps": ([0.5, 0.6, 0.7, 0.8], [0, 0, 0, 0], "VP80", -1, [0.5, 0.6, 0.7, 0.8]),
    "a stall": ([0, 0.1, 10.1, 10.2], [5, 5.1, 15.1, 15.2], "VP80", 0, [0, 0.1, 10.1, 10.2]),
    "a burst after a long stall": ([0, 40, 40, 40.1], [5, 5.1, 45, 45.1], "VP80", 0, [0, 0.1, 40, 40.1]),
    "a burst after a stall": ([0, 10, 10, 10, 10.1], [5, 5.1, 9, 14.9, 15.1], "VP80", 0, [0, 0.1, 4, 9.9, 10.1]),
    "started again": ([0, 1, 2, 3], [50, 51, 0.1, 1.1], "VP80", 0, [0, 1, 2, 3]),
    "a camera clock that is set": ([0, 1, 2, 3], [50, 51, 9052, 9053], "VP80", 0, [0, 1, 2, 3]),
    "stamps too slow": ([0, 100, 200, 300], [1, 11, 21, 31], "VP80", 0, [0, 10, 200, 210]),
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


# -- clips of each rate -----------------------------------------------------------------------------------------------


def write_ramp(path: Path, num_frames: int, fps: int = 10) -> Path:
    """Each frame is eight levels brighter than the previous one, so that its shade identifies it."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (64, 48))
    for place in range(num_frames):
        writer.write(np.full((48, 64, 3), 8 * place, np.uint8))
    writer.release()
    return path


def numbers(clip: Chunk) -> list[int]:
    """The indices of a clip's frames in a ramp."""
    return [round(float(np.asarray(Image.open(io.BytesIO(frame))).mean()) / 8) for frame in clip.frames]


BY_RATE = [
    (ClipShape(2, 5), [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18], [20, 20]]),  # every other frame
    (ClipShape(2, 4), [[0, 2], [5, 7], [10, 12], [15, 17], [20, 20]]),  # between frames the earlier one
    (ClipShape(1, 2), [[0], [5], [10], [15], [20]]),
    (ClipShape(3, 10), [[first, first + 1, first + 2] for first in range(0, 21, 3)]),
    (ClipShape(4, 2), [[0, 5, 10, 15], [20, 20, 20, 20]]),  # two seconds each
    (ClipShape(2), [[0, 9], [10, 19], [20, 20]]),  # a second each
    (ClipShape(1), [[5], [15], [20]]),
]


def test_a_clip_has_the_frames_of_its_rate_and_heads_read_a_video_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    capture = cv2.VideoCapture

    def counted(address: Any, *options: Any) -> Any:
        opened.append(address)
        return capture(address, *options)

    monkeypatch.setattr(sources_module.cv2, "VideoCapture", counted)
    source = file_source(write_ramp(tmp_path / "ramp.mp4", 21))
    together = list(read_clips(source, [shape for shape, _ in BY_RATE]))
    assert len(opened) == 1
    for head, (shape, wanted) in enumerate(BY_RATE):
        clips = [clip for place, clip in together if place == head]
        assert [numbers(clip) for clip in clips] == wanted and [clip.index for clip in clips] == list(
            range(len(wanted))
        )
        seconds = 1.0 if shape.fps is None else shape.num_frames / shape.fps
        assert [clip.seconds for clip in clips] == [seconds] * len(clips)
        assert [clip.start_s for clip in clips] == pytest.approx([index * seconds for index in range(len(clips))])
    for length, num_frames in itertools.product((1, 3, 14), (1, 4)):  # a video shorter than a clip is one clip
        short = file_source(write_ramp(tmp_path / f"{length}.mp4", length, fps=30))
        ((_, clip),) = read_clips(short, [ClipShape(num_frames)], shown=True)
        assert (clip.start_s, len(clip.frames), numbers(clip)[0], clip.width) == (0, num_frames, 0, 64)


def test_a_rate_above_a_files_is_refused_and_above_a_cameras_capped(tmp_path: Path) -> None:
    source = file_source(write_ramp(tmp_path / "ramp.mp4", 12))
    with pytest.raises(BadImage, match=r"ramp\.mp4' at 25 frames per second: it has 10 on average; give a lower --fps"):
        list(read_clips(source, [ClipShape(1, 25)]))
    lines: list[str] = []
    camera = source._replace(kind="live")
    clips = itertools.islice(read_clips(camera, [ClipShape(1, 25), ClipShape(1, 25)], say=lines.append), 24)
    assert [(place, numbers(clip)) for place, clip in clips] == [(n % 2, [n // 2]) for n in range(24)]
    once = ["ramp: the camera declares 10 frames per second, not 25; missing frames are repeated"]
    assert lines == once, "for all heads"


def sampled(shape: ClipShape, times: Sequence[float], shown: bool = False, broken: Sequence[int] = ()) -> list[Chunk]:
    """The clips of frames that contain their index."""

    def frame(text: str) -> Frame:
        return Frame(text.encode, lambda: text.upper().encode(), 64)

    sampler, clips = Sampler(shape, times[1] - times[0], shown), []
    for index, time_s in enumerate(times):
        clips.append(sampler.advance(time_s))
        clips.append(sampler.add(frame(str(index)) if sampler.wants and index not in broken else None))
    return [clip for clip in (*clips, sampler.rest()) if clip is not None]


@pytest.mark.parametrize("rate", [23.976, 25.0, 29.97, 59.94])
@pytest.mark.parametrize("fps", [1.0, 4.0, 7.5, 23.976])
def test_at_any_rate_clips_follow_each_other_and_frames_their_time(rate: float, fps: float) -> None:
    times = [round(index / rate, 3) for index in range(round(20 * rate))]  # Matroska has milliseconds
    clips = [clip for clip in sampled(ClipShape(4, fps), times, shown=True) if clip.start_s + clip.seconds <= 20]
    taken = [int(frame) for clip in clips for frame in clip.frames]
    assert len(taken) == len(set(taken)) and abs(len(taken) - 20 * fps) <= 5
    for number, index in enumerate(taken):
        assert -0.3 / rate < number / fps - index / rate < 1 / rate, "the last frame available at its time"
    shown = [int(picture) for clip in clips for picture in clip.shown]
    assert shown == sorted(set(shown)) and len(shown) <= 10 * (len(clips) * 4 / fps) + len(clips)
    for clip in clips:
        own = [times[int(picture)] - clip.start_s for picture in clip.shown]
        assert clip.shown_s == pytest.approx(own), "each picture has its time"


@pytest.mark.parametrize(
    ("rate", "num_frames", "length"), [(29.97, 2, 29.97), (12.5, 1, 12.5), (7.5, 4, 7.5), (0.5, 2, 2), (5.0, 8, 8)]
)
@pytest.mark.parametrize("shown", [False, True])
def test_a_clip_without_a_rate_starts_with_its_first_frame(
    rate: float, num_frames: int, length: float, shown: bool
) -> None:
    clips = sampled(ClipShape(num_frames), [index / rate for index in range(int(40 * length) + 1)], shown)
    assert 40 <= len(clips) <= 42 and [clip.index for clip in clips] == list(range(len(clips)))
    for clip, after in itertools.pairwise(clips):
        assert clip.start_s * rate == pytest.approx(round(clip.start_s * rate)), "the time of a frame"
        assert after.start_s - clip.start_s == pytest.approx(clip.seconds, abs=1.1 / rate)
        assert clip.start_s == pytest.approx(clip.index * max(1, length / rate), abs=1.1 / rate), "they do not drift"
        assert clip.start_s <= int(clip.frames[0]) / rate <= int(clip.frames[-1]) / rate < after.start_s
    broken = sampled(ClipShape(1), [index / 10 for index in range(10)], broken=(0, 5))
    assert [clip.frames for clip in broken] == [(b"1",)], "a frame that cannot be decoded is replaced"


# -- reading ----------------------------------------------------------------------------------------------------------


def fed(monkeypatch: pytest.MonkeyPatch, kind: Any, number: int, pause_s: float = 0.0) -> SourceReader:
    """A reading for two heads, with this many clips for each."""

    def clips(source: Source, shapes: Sequence[ClipShape], **_: object) -> Iterator[tuple[int, Chunk]]:
        for index in range(number):
            time.sleep(pause_s)
            for head in range(len(shapes)):
                yield head, Chunk(index, float(index), (b"frame",), began=1000.0)

    monkeypatch.setattr("apps.video_analytics.source_reader.read_clips", clips)
    return SourceReader(Source("s", "0", kind), [ClipShape(1), ClipShape(1)], stop=threading.Event())


def test_a_slow_head_holds_up_the_others_of_a_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, gone = fed(monkeypatch, "live", 20, pause_s=0.01), threading.Event()
    taken = [clip.index for clip in iter(lambda: reader.take(0, gone), None)]
    assert taken == list(range(20)), "the other head has taken no clip"
    gap, *left = iter(lambda: reader.take(1, gone), None)
    assert [clip.index for clip in left] == [18, 19], "the newest clips are left"
    assert (gap.index, gap.start_s, gap.seconds, gap.frames) == (0, 0.0, 18.0, ())
    assert gap.problem == "newer clips replaced 18 clips before they could be sent"
    assert gap.utc(gap.start_s) < left[0].utc(left[0].start_s), "times do not go back"
    ahead = Chunk(0, 0.0, (), began=time.time())
    assert ahead.utc(600.0).timestamp() <= time.time(), "a file that is read faster than it was taken"
    for head in range(2):
        reader.leave(head)
    reader = fed(monkeypatch, "file", 50)
    assert all([reader.take(0, gone) for _ in range(3)])
    reader.leave(1)  # its stream has failed
    assert len([clip for clip in iter(lambda: reader.take(0, gone), None)]) == 47
    reader.leave(0)
    assert not reader.running


def test_a_camera_that_is_lost_or_not_there_yet_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, lines, opened = threading.Event(), list[str](), list[None]()
    failing: tuple[int, ...] = (2,)

    def read(*_: object) -> Iterator[tuple[int, Chunk]]:
        opened.append(None)
        if len(opened) in failing:
            raise BadImage("cannot read video")
        yield 0, Chunk(0, 0.0, (b"frame",))
        yield 0, Chunk(1, 1.0, (b"frame",))

    monkeypatch.setattr(sources_module, "read_video", read)
    monkeypatch.setattr(sources_module, "FIRST_PAUSE_S", 0.01)
    camera = Source("camera-0", "0", "live")
    chunks = clips_of(camera, 1, stop=stop, say=lines.append)
    assert [next(chunks).index for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    stop.set()
    assert list(chunks) == [] and len(opened) == 4
    assert lines[0].startswith("camera-0: the camera sends no more frames; retrying")
    assert lines[1].startswith("camera-0: cannot read video; retrying")
    opened.clear()
    failing = (1, 2, 3)
    for source, wait_s in ((camera, 0), (Source("street", "street.mp4", "file"), 60)):
        with pytest.raises(BadImage):
            next(clips_of(source, 1, wait_s=wait_s))
    assert len(opened) == 2 and next(clips_of(camera, 1, wait_s=60)).index == 0 and len(opened) == 4


def test_a_camera_that_stalls_and_ends_and_comes_back_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, which has no time stamps: a stall of 10 s, fewer frames at night, and a second connection."""
    evening, night = [place / 10 for place in range(20)], [12 + place / 5 for place in range(15)]
    arrivals = [evening + night, [17 + place / 20 for place in range(41)]]
    captures = iter([Capture([(at, 0.0) for at in own], 25.0, "MJPG", 0) for own in arrivals])
    stop, lines, opened = threading.Event(), list[str](), list[Capture]()

    def connect(*_: object) -> Capture:
        opened.append(next(captures))
        return opened[-1]

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == len(arrivals):
            stop.set()

    monkeypatch.setattr(cv2, "VideoCapture", connect)
    for module in (opencv, sources_module):
        monkeypatch.setattr(module, "clock", lambda: opened[-1].now if opened else 100.0)
    monkeypatch.setattr(sources_module, "FIRST_PAUSE_S", 0.0)
    source, shapes = Source("camera", "http://camera/", "live"), [ClipShape(1), ClipShape(1, 2)]
    clips = list(read_clips(source, shapes, stop=stop, shown=True, say=say))
    assert [round(clip.start_s, 1) for place, clip in clips if place == 0] == [0, 1, 12, 13, 14, 17, 18, 19]
    twice = [round(clip.start_s, 1) for place, clip in clips if place == 1]
    assert twice == [0, 0.5, 1, 1.5, 12, 12.5, 13, 13.5, 14, 14.5, 17, 17.5, 18, 18.5, 19]
    for _, clip in clips:
        levels = [float(np.asarray(Image.open(io.BytesIO(encoded))).mean()) for encoded in clip.shown]
        times = [int(clip.start_s + since_s + 1e-6) for since_s in clip.shown_s]
        assert levels == pytest.approx([10 * second + 5 for second in times], abs=1), "each picture has its time"
    assert [line.partition(";")[0] for line in lines] == ["camera: the camera sends no more frames"] * 2
