"""Recognizes the events of a plan in a head's answers and in the tracks of its objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.plan.schema import Condition, EventPlan, Point
from apps.video_analytics.sampling import Chunk
from apps.video_analytics.tracking import TrackedBox, TrackedFrame
from vlora.client import HeadResult
from vlora.opencv import cv2

_MOST_REMEMBERED = 1000  # objects for which an event does not happen again


@dataclasses.dataclass(frozen=True)
class Happened:
    """An event that happened.

    time_s: of the frame, from the beginning of the source. picture: the frame, JPEG; of an event of a tracked object at
    most 640 pixels wide. label, confidence, count: of the answer or the object. track: number of the object.
    """

    event: EventPlan
    time_s: float
    picture: bytes
    label: str
    confidence: float
    count: int | None = None
    track: int | None = None


class EventWatch:
    """Watches for one event of one camera."""

    def __init__(self, event: EventPlan) -> None:
        self.event = event
        self._held = False
        self._last_s: float | None = None
        self._centres: dict[int, Point] = {}  # of the objects in the last frame, as shares of the picture
        self._counted: set[int] = set()  # objects for which the event happened

    def see(self, clip: Chunk, result: ChunkResult, frames: Sequence[TrackedFrame]) -> list[Happened]:
        """The event as often as it happens in a clip.

        Args:
            frames: the tracked objects in each picture of the clip; empty without tracks.
        """
        found = self._tracks(clip, frames) if self.event.when.needs_tracks else self._answer(clip, result)
        happened = []
        for each in found:
            if self._last_s is None or each.time_s - self._last_s >= self.event.pause_s:
                self._last_s = each.time_s
                happened.append(each)
        return happened

    def _answer(self, clip: Chunk, result: ChunkResult) -> Iterator[Happened]:
        if result.answer is None:
            return
        before, self._held = self._held, holds(self.event.when, result.answer)
        if self._held and not before:
            count = counted(self.event.when, result.answer)
            yield Happened(self.event, clip.start_s, clip.frames[-1], result.label, result.confidence, count)

    def _tracks(self, clip: Chunk, frames: Sequence[TrackedFrame]) -> Iterator[Happened]:
        for frame, picture in zip(frames, clip.shown, strict=True):
            before, self._centres = self._centres, {}
            for box in frame.boxes:
                if _matches(self.event.when, box.label, box.score):
                    self._centres[box.id] = centre = _centre(box, frame)
                    if box.id not in self._counted and _arrives(self.event.when, before.get(box.id), centre):
                        self._counted.add(box.id)
                        yield Happened(self.event, frame.time_s, picture, box.label, box.score, track=box.id)
        newest = max(self._counted, default=0)
        # Objects are numbered in the order of their first detection; the oldest are gone, unless they are in the frame.
        self._counted = {each for each in self._counted if each in self._centres or each > newest - _MOST_REMEMBERED}


def holds(when: Condition, answer: HeadResult) -> bool:
    """Whether a condition without tracks holds for an answer."""
    if when.over is None and when.under is None:
        match answer.task:
            case "detection":
                return any(_matches(when, box.label, box.score) for box in answer.boxes)
            case "multi_label":
                return any(_matches(when, answer.labels[each], answer.scores[each]) for each in answer.chosen)
            case _:
                return _matches(when, answer.label, answer.confidence)
    count = counted(when, answer)
    if count is None or (answer.task != "detection" and answer.confidence < when.confidence):
        return False
    return (when.over is None or count > when.over) and (when.under is None or count < when.under)


def counted(when: Condition, answer: HeadResult) -> int | None:
    """The count of a counting head, or the number of matching objects of a detection; None for other heads."""
    if answer.task == "detection":
        return sum(_matches(when, box.label, box.score) for box in answer.boxes)
    return answer.count


def _matches(when: Condition, label: str, score: float) -> bool:
    return (when.label is None or label == when.label) and score >= when.confidence


def _centre(box: TrackedBox, frame: TrackedFrame) -> Point:
    return (box.left + box.right) / 2 / frame.width, (box.top + box.bottom) / 2 / frame.height


def _arrives(when: Condition, before: Point | None, now: Point) -> bool:
    """Whether an object crosses the line on its way, or is in the area and was not before."""
    if when.crosses is not None:
        return before is not None and _cross(before, now, *when.crosses)
    assert when.enters is not None
    return _is_in(now, when.enters) and (before is None or not _is_in(before, when.enters))


def _cross(start: Point, end: Point, first: Point, second: Point) -> bool:
    """Whether the way from start to end crosses the line from first to second."""
    before, after = _side(first, second, start), _side(first, second, end)
    return before * after <= 0 and before != after and _side(start, end, first) * _side(start, end, second) <= 0


def _side(start: Point, end: Point, point: Point) -> float:
    """Positive on one side of a line, negative on the other."""
    return (end[0] - start[0]) * (point[1] - start[1]) - (end[1] - start[1]) * (point[0] - start[0])


def _is_in(point: Point, corners: Sequence[Point]) -> bool:
    return cv2.pointPolygonTest(np.array(corners, np.float32), point, False) >= 0
