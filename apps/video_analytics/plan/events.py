"""The events of a plan: recognized in a head's answers and in the tracks of its objects, asked about, and sent."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from apps.video_analytics.analysis import Analysis
from apps.video_analytics.annotate import EventClips, snapshot
from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.plan.schema import CameraPlan, Condition, EventPlan, EventQuestion, Point
from apps.video_analytics.sampling import Chunk
from apps.video_analytics.sink_plan import EventResult
from apps.video_analytics.sinks import Sinks
from apps.video_analytics.tracking import TrackedBox, TrackedFrame
from vlora.client import Answer, HeadResult
from vlora.errors import BadConfig, VLoraError
from vlora.opencv import cv2
from vlora.run_folder import write_whole, writing

_MOST_REMEMBERED = 1000  # objects for which an event does not happen again
_VERIFY_S = 10.0  # bound on a verification: its event waits
_MOST_PENDING = 8  # questions of a camera: a flood of events must not delay its clips or fill the memory


@dataclasses.dataclass(frozen=True)
class Happened:
    """An event that happened.

    time_s: of the frame, from the beginning of the source. picture: the frame, JPEG; of an event of a tracked object at
    most 640 pixels wide. label, confidence, count: of the answer or the object. track: number of the object. frame: of
    the tracked object.
    """

    event: EventPlan
    time_s: float
    picture: bytes
    label: str
    confidence: float
    count: int | None = None
    track: int | None = None
    frame: TrackedFrame | None = None


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
                        yield Happened(self.event, frame.time_s, picture, box.label, box.score, None, box.id, frame)
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
        camera: CameraPlan,
        analysis: Analysis,
        sinks: Sinks,
        report: Callable[[EventResult], None],
    ) -> None:
        """The folder of `analysis` gets CAMERA.events.jsonl, and pictures and clips in CAMERA.events. report: called
        with each event after it was sent. Raises BadConfig if the files cannot be written.
        """
        self.num_events = 0
        self._client, self._source, self._out = analysis.client, camera.name, analysis.out if camera.events else None
        self._sinks, self._report = sinks, report
        self._lock = threading.Lock()
        self._num_pending = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"events of {camera.name}")
        self._clips: EventClips | None = None
        if self._out is None and camera.events and camera.clips is not None:
            raise BadConfig(f"camera {camera.name}: clips need a folder; set `out` in the plan, or give --out")
        if self._out is not None:
            self._rows, folder = self._out / f"{camera.name}.events.jsonl", self._out / f"{camera.name}.events"
            with writing(self._rows):
                self._rows.write_text("")
                folder.mkdir(exist_ok=True)
            self._clips = None if camera.clips is None else EventClips(camera.clips, folder, analysis.print_line)

    def keep(self, chunk: Chunk) -> None:
        """Keep the pictures of a chunk for clips. Called before `add`."""
        if self._clips is not None:
            self._clips.add(chunk)

    def add(self, happened: Happened, chunk: Chunk, answered: ChunkResult) -> None:
        """Record an event. Its question is asked in another thread. Raises BadConfig if it cannot be written."""
        event, event_id, drawn, clip = happened.event, uuid.uuid4().hex, None, None
        name = f"{event.name}-{event_id}"  # unlike those of earlier runs
        if self._clips is not None:
            drawn = snapshot(happened.picture, chunk, answered, happened.frame)
            clip = f"{self._source}.events/{name}.webm" if self._clips.begin(f"{name}.webm", happened.time_s) else None
        with self._lock:
            self.num_events += 1
            room = self._num_pending < _MOST_PENDING
            asks = event.verify is not None or event.ask is not None
            self._num_pending += asks and room
        result = EventResult(
            id=event_id,
            source=self._source,
            event=event.name,
            start_s=happened.time_s,
            time=chunk.utc(happened.time_s),
            head=event.when.head,
            label=happened.label,
            confidence=happened.confidence,
            count=happened.count,
            track=happened.track,
            picture=self._write_picture(f"{name}.jpg", happened.picture),
            snapshot=self._write_picture(f"{name}.boxes.jpg", drawn),
            clip=clip,
            adapter=None if event.ask is None else event.ask.adapter,
            question="" if event.ask is None else event.ask.question,
        )
        if not asks:
            self._record(result)
        elif room:
            self._threads.submit(self._ask, result, happened)
        else:
            problem = f"not asked: {_MOST_PENDING} questions of earlier events wait for their answers"
            self._record(msgspec.structs.replace(result, problem=problem))

    def close(self) -> None:
        """Wait for the answers to all questions, and for clips."""
        self._threads.shutdown()
        if self._clips is not None:
            self._clips.close()

    def _ask(self, result: EventResult, happened: Happened) -> None:
        event, began = happened.event, time.monotonic()
        verified, text, problem = None, None, None
        try:
            if event.verify is not None:
                verified = event.verify.holds(self._answer(event.verify, happened, _VERIFY_S).text)
            if event.ask is not None and verified is not False:
                text = self._answer(event.ask, happened, None)
        except VLoraError as error:  # an event that could not be verified is sent: a missed one is worse
            problem = str(error)
        with self._lock:
            self._num_pending -= 1
        latency_s = time.monotonic() - began
        answered = {"verified": verified, "text": text, "problem": problem, "latency_s": latency_s}
        result = msgspec.structs.replace(result, **answered)
        try:
            self._record(result)
        except VLoraError as error:  # a full disk; the answer is still reported
            self._report(msgspec.structs.replace(result, problem=str(error)))

    def _answer(self, asked: EventQuestion, happened: Happened, seconds: float | None) -> Answer:
        return self._client.generate(
            asked.question, [happened.picture], asked.adapter, max_tokens=asked.max_tokens, max_latency_s=seconds
        )

    def _record(self, result: EventResult) -> None:
        if result.verified is not False:
            self._sinks.send(result)
        if self._out is not None:
            with self._lock, writing(self._rows), self._rows.open("ab") as lines:
                lines.write(msgspec.json.encode(result) + b"\n")
        self._report(result)

    def _write_picture(self, name: str, picture: bytes | None) -> str | None:
        if self._out is None or picture is None:
            return None
        name = f"{self._source}.events/{name}"
        with writing(self._out / name):
            write_whole(self._out / name, picture, durable=False)
        return name
