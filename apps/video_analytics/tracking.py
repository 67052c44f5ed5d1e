"""Follows detected objects from frame to frame, and gives each a number.

A detection head answers about the first frame of each clip. On the other frames, boxes move with the picture's optical
flow, or as ByteTrack (`edgefirst-tracker`) predicts where the flow finds nothing. ByteTrack receives the boxes of every
frame, one tracker for each label, and assigns detections to the objects that are followed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from edgefirst.tracker import ByteTrack

from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.sampling import Chunk
from vlora.opencv import cv2

_MOST_MISSED = 2  # consecutive answers without a detection of the object
_OVERLAP = 0.2  # IoU of a detection and an object's predicted box
_WEIGHT = 1.0  # of the given against the predicted position: positions of every frame are given
_LIFESPAN_S = 2.0  # ByteTrack's memory of objects without a box
_MOST_SKIPPED = 100  # frames of a gap for which ByteTrack predicts positions

Grey = npt.NDArray[np.uint8]
"""A grey picture [height, width]."""

# Moves boxes from one frame to the next with the pictures' own motion (sparse Lucas-Kanade flow of OpenCV).

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


class TrackedBox(msgspec.Struct, frozen=True, kw_only=True):
    """An object in a frame; edges in pixels of the camera's picture.

    id: number of the object, from 1. detected: by the head in this frame; else moved from the frame before.
    """

    id: int
    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float
    detected: bool


class TrackedFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The objects in one frame.

    index: of the frame among those read, from 0. time_s: from the beginning of the source. width, height: of the
    camera's picture.
    """

    index: int
    time_s: float
    width: int
    height: int
    boxes: tuple[TrackedBox, ...]


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """The life of an object that is no longer followed. frames: with the object. detections: by the head."""

    id: int
    label: str
    first_s: float
    last_s: float
    frames: int
    detections: int


@dataclasses.dataclass
class _Object:
    """A followed object.

    box: in pixels of the pictures that are kept. uuid: of its track in ByteTrack; empty if another object took it.
    missed: answers since its last detection.
    """

    id: int
    label: str
    uuid: str
    score: float
    box: Edges
    first_s: float
    last_s: float
    frames: int = 0
    detections: int = 0
    detected: bool = False
    missed: int = 0


class ObjectTracker:
    """The objects of one camera and one detection head.

    Attributes:
        ended: objects that are no longer followed; the caller takes them from the list.
        detected: numbers of the objects of the last answer, in the order of its boxes.
        counts: objects so far by label.
    """

    def __init__(self) -> None:
        self.ended: list[Track] = []
        self.detected: tuple[int, ...] = ()
        self.counts: Counter[str] = Counter()
        self._objects: list[_Object] = []
        self._tracks: dict[str, _LabelTracks] = {}
        self._num_frames = 0
        self._before: Grey | None = None
        self._next_index, self._end_s = 0, 0.0  # of the clip that follows without a gap

    def follow(self, clip: Chunk, result: ChunkResult) -> list[TrackedFrame]:
        """The objects in each frame of a clip. Its first frame is the one that `result` is about."""
        if not clip.shown:
            return []  # a clip with a problem: the next one begins after a gap
        self._skip_gap(clip)
        frames = []
        for place, (encoded, since_s) in enumerate(zip(clip.shown, clip.shown_s, strict=True)):
            picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_GRAYSCALE)
            assert picture is not None, "pictures of a clip are JPEGs made here"
            now = picture.astype(np.uint8, copy=False)
            time_s = clip.start_s + since_s
            if self._before is not None and self._before.shape != now.shape:
                self._before = None  # a camera with another resolution, or pictures of several sizes
            scale = now.shape[1] / clip.width
            detects = place == 0 and result.answer is not None
            self._move(now, time_s, update=not detects)
            if detects:
                self._detect(result, time_s, scale)
            self._before = now
            frames.append(self._frame(now, time_s, scale))
        self._next_index, self._end_s = clip.index + 1, time_s + clip.seconds / len(clip.shown)
        return frames

    def close(self) -> None:
        """End all objects."""
        self._end(self._objects)

    def _skip_gap(self, clip: Chunk) -> None:
        """Positions are predicted without flow over the gap of clips that were replaced, or of a lost camera.

        Clips of a camera begin at the time at which they were read, which varies; shorter gaps are none.
        """
        missing_s = clip.start_s - self._end_s
        if clip.index == self._next_index and missing_s < clip.seconds:
            return
        self._before, step_s = None, clip.seconds / len(clip.shown)
        for number in range(min(_MOST_SKIPPED, round(missing_s / step_s))):
            for tracks in self._tracks.values():
                tracks.update([], self._end_s + number * step_s)

    def _move(self, now: Grey, time_s: float, *, update: bool) -> None:
        """Move the objects from the frame before to this one.

        Args:
            update: give the moved boxes to ByteTrack; else detections of this frame follow.
        """
        flow: list[Edges | None] = [None] * len(self._objects)
        if self._before is not None:
            flow = move(self._before, now, [each.box for each in self._objects])
        for each, box in zip(self._objects, flow, strict=True):
            each.box, each.detected = box or each.box, False
        for label, tracks in self._tracks.items() if update else ():
            both = [pair for pair in zip(self._objects, flow, strict=True) if pair[0].label == label]
            found, lost = [each for each, box in both if box], [each for each, box in both if not box]
            for each, uuid in zip(found, tracks.update([each.box for each in found], time_s), strict=True):
                each.uuid = uuid
            taken = {each.uuid for each in found}
            for each in lost:
                each.uuid = "" if each.uuid in taken else each.uuid
                each.box = tracks.predicted(each.uuid) or each.box
        height, width = now.shape
        for each in (inside := [each for each in self._objects if _is_inside(each.box, width, height)]):
            each.last_s, each.frames = time_s, each.frames + 1
        self._end([each for each in self._objects if each not in inside])

    def _detect(self, result: ChunkResult, time_s: float, scale: float) -> None:
        """Replace the boxes of this frame by those that the head found."""
        assert result.answer is not None
        found: dict[str, list[tuple[int, Edges]]] = {label: [] for label in self._tracks}
        for place, box in enumerate(result.answer.boxes):
            edges = Edges(box.left * scale, box.top * scale, box.right * scale, box.bottom * scale)
            found.setdefault(box.label, []).append((place, edges))
        known = {each.uuid: each for each in self._objects if each.uuid}
        for each in self._objects:
            each.missed += 1
        ids: dict[int, int] = {}
        for label, boxes in found.items():
            tracks = self._tracks.setdefault(label, _LabelTracks())
            for uuid, (place, edges) in zip(tracks.update([box for _, box in boxes], time_s), boxes, strict=True):
                each = known.get(uuid) or self._new(label, uuid, time_s, tracks.ended)
                each.box, each.score, each.detected, each.missed = edges, result.answer.boxes[place].score, True, 0
                each.detections += 1
                ids[place] = each.id
        self.detected = tuple(ids[place] for place in range(len(ids)))
        self._end([each for each in self._objects if each.missed > _MOST_MISSED])

    def _new(self, label: str, uuid: str, time_s: float, ended: dict[str, int]) -> _Object:
        """An object; it keeps its number if it was followed until shortly before."""
        number = ended.pop(uuid, None)
        if number is None:
            self.counts[label] += 1
            number = self.counts.total()
        made = _Object(number, label, uuid, 0.0, Edges(0, 0, 0, 0), time_s, time_s, frames=1)
        self._objects.append(made)
        return made

    def _end(self, gone: Sequence[_Object]) -> None:
        for each in gone:
            if each.uuid:
                self._tracks[each.label].ended[each.uuid] = each.id
            life = {name: getattr(each, name) for name in Track.__struct_fields__}
            self.ended.append(Track(**life))
        self._objects = [each for each in self._objects if each not in gone]

    def _frame(self, now: Grey, time_s: float, scale: float) -> TrackedFrame:
        boxes = tuple(
            TrackedBox(
                id=each.id,
                label=each.label,
                score=each.score,
                **{edge: value / scale for edge, value in each.box._asdict().items()},
                detected=each.detected,
            )
            for each in self._objects
        )
        height, width = (round(side / scale) for side in now.shape)
        self._num_frames += 1
        return TrackedFrame(index=self._num_frames - 1, time_s=time_s, width=width, height=height, boxes=boxes)


class _LabelTracks:
    """The objects of one label in ByteTrack, which does not compare labels.

    Attributes:
        ended: numbers of objects that are no longer followed, by their uuid, while ByteTrack remembers them.
    """

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        self._last_ns = 0
        self._tracker = ByteTrack(high_conf=0.0, iou=_OVERLAP, update=_WEIGHT, lifespan_ns=round(_LIFESPAN_S * 1e9))

    def update(self, boxes: Sequence[Edges], time_s: float) -> list[str]:
        """The uuids of the objects at these boxes; new ones for boxes that are at no predicted position."""
        count = len(boxes)
        edges = np.array(boxes, np.float32).reshape(count, 4)
        self._last_ns = max(self._last_ns + 1, round(time_s * 1e9))  # clips of a camera may overlap by an instant
        infos = self._tracker.update(edges, np.ones(count, np.float32), np.zeros(count, np.uintp), self._last_ns)
        if self.ended:
            alive = {active.info.uuid for active in self._tracker.get_active_tracks()}
            self.ended = {uuid: number for uuid, number in self.ended.items() if uuid in alive}
        return ["" if info is None else info.uuid for info in infos]

    def predicted(self, uuid: str) -> Edges | None:
        """The predicted box of an object at the time of the last update."""
        for active in self._tracker.get_active_tracks():
            if active.info.uuid == uuid:
                return Edges(*active.info.tracked_location)
        return None


def _is_inside(box: Edges, width: int, height: int) -> bool:
    """Whether the centre of a box is in the picture."""
    return 0 <= (box.left + box.right) / 2 < width and 0 <= (box.top + box.bottom) / 2 < height
