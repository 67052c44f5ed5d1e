"""The events of a plan: recognized in a head's answers and in the tracks of its objects, asked about, and sent."""

from __future__ import annotations

import dataclasses
import datetime
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.plan.schema import Condition, EventPlan, Point
from apps.video_analytics.sampling import Chunk
from apps.video_analytics.sink_plan import EventResult
from apps.video_analytics.sinks import Sinks
from apps.video_analytics.tracking import TrackedBox, TrackedFrame
from vlora.client import Client, HeadResult
from vlora.errors import VLoraError
from vlora.opencv import cv2
from vlora.run_folder import write_whole, writing

_MOST_REMEMBERED = 1000  # objects for which an event does not happen again
_MOST_PENDING = 8  # questions of a camera: a flood of events must not delay its clips or fill the memory


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


class EventQuestions:
    """The events of one camera. Questions are asked one at a time, in the order of the events."""

    def __init__(
        self,
        client: Client,
        source: str,
        out: Path | None,
        sinks: Sinks,
        report: Callable[[EventResult], None],
    ) -> None:
        """
        Args:
            source: name of the camera.
            out: folder for SOURCE.events.jsonl, and for the pictures in SOURCE.events; None writes nothing.
            sinks: receive each event after its answer.
            report: called with each event after it was sent.

        Raises:
            BadConfig: the files cannot be written.
        """
        self.num_events = 0
        self._client = client
        self._source = source
        self._sinks, self._report = sinks, report
        self._out = out
        self._lock = threading.Lock()
        self._num_pending = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"events of {source}")
        if out is not None:
            self._rows = out / f"{source}.events.jsonl"
            with writing(self._rows):
                self._rows.write_text("")
                (out / f"{source}.events").mkdir(exist_ok=True)

    def add(self, happened: Happened) -> None:
        """Record an event. Its question is asked in another thread. Raises BadConfig if it cannot be written."""
        event = happened.event
        event_id = uuid.uuid4().hex
        with self._lock:
            self.num_events += 1
            room = self._num_pending < _MOST_PENDING
            self._num_pending += event.ask is not None and room
        result = EventResult(
            id=event_id,
            source=self._source,
            event=event.name,
            start_s=happened.time_s,
            time=datetime.datetime.now(datetime.UTC),
            head=event.when.head,
            label=happened.label,
            confidence=happened.confidence,
            count=happened.count,
            track=happened.track,
            picture=self._write_picture(event_id, happened),
            adapter=None if event.ask is None else event.ask.adapter,
            question="" if event.ask is None else event.ask.question,
        )
        if event.ask is None:
            self._record(result)
        elif room:
            self._threads.submit(self._ask, result, happened)
        else:
            problem = f"not asked: {_MOST_PENDING} questions of earlier events wait for their answers"
            self._record(msgspec.structs.replace(result, problem=problem))

    def close(self) -> None:
        """Wait for the answers to all questions."""
        self._threads.shutdown()

    def _ask(self, result: EventResult, happened: Happened) -> None:
        ask, began = happened.event.ask, time.monotonic()
        assert ask is not None
        text, problem = None, None
        try:
            text = self._client.generate(ask.question, [happened.picture], ask.adapter, max_tokens=ask.max_tokens)
        except VLoraError as error:
            problem = str(error)
        with self._lock:
            self._num_pending -= 1
        latency_s = time.monotonic() - began
        try:
            self._record(msgspec.structs.replace(result, text=text, problem=problem, latency_s=latency_s))
        except VLoraError as error:  # a full disk; the answer is still reported
            self._report(msgspec.structs.replace(result, text=text, problem=str(error), latency_s=latency_s))

    def _record(self, result: EventResult) -> None:
        self._sinks.send(result)
        if self._out is not None:
            with self._lock, writing(self._rows), self._rows.open("ab") as lines:
                lines.write(msgspec.json.encode(result) + b"\n")
        self._report(result)

    def _write_picture(self, event_id: str, happened: Happened) -> str | None:
        if self._out is None:
            return None
        name = f"{self._source}.events/{happened.event.name}-{event_id}.jpg"  # unlike those of earlier runs
        with writing(self._out / name):
            write_whole(self._out / name, happened.picture, durable=False)
        return name
