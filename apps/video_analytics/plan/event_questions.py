"""Asks a plan's questions about the frames at which events happen, beside the streams, and records the answers."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from apps.video_analytics.plan.events import Happened
from vlora.client import Answer, Client
from vlora.errors import VLoraError
from vlora.run_folder import write_whole, writing

_MOST_PENDING = 8  # questions of a camera: a flood of events must not delay its clips or fill the memory


class EventResult(msgspec.Struct, frozen=True, kw_only=True):
    """An event, with the answer to its question.

    start_s: of the frame, from the beginning of the source. time: UTC. label, confidence, count, track: of the answer
    or the object that made it happen. picture: file of the frame, relative to the results' folder. text: None without a
    question, and after an error, which is then `problem`. latency_s: from the event to the answer.
    """

    source: str
    event: str
    start_s: float
    time: datetime.datetime
    head: str
    label: str
    confidence: float
    count: int | None = None
    track: int | None = None
    picture: str | None = None
    adapter: str | None = None
    question: str = ""
    text: Answer | None = None
    problem: str | None = None
    latency_s: float = 0.0


class EventQuestions:
    """The events of one camera. Questions are asked one at a time, in the order of the events."""

    def __init__(
        self, client: Client, source: str, out: Path | None, report: Callable[[EventResult], None] = lambda event: None
    ) -> None:
        """
        Args:
            source: name of the camera.
            out: folder for SOURCE.events.jsonl, and for the pictures in SOURCE.events; None writes nothing.
            report: called with each event, after its answer.

        Raises:
            BadConfig: the files cannot be written.
        """
        self.num_events = 0
        self._client = client
        self._source = source
        self._report = report
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
        with self._lock:
            self.num_events += 1
            number = self.num_events
            room = self._num_pending < _MOST_PENDING
            self._num_pending += event.ask is not None and room
        result = EventResult(
            source=self._source,
            event=event.name,
            start_s=happened.time_s,
            time=datetime.datetime.now(datetime.UTC),
            head=event.when.head,
            label=happened.label,
            confidence=happened.confidence,
            count=happened.count,
            track=happened.track,
            picture=self._write_picture(number, happened),
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
        if self._out is not None:
            with self._lock, writing(self._rows), self._rows.open("ab") as lines:
                lines.write(msgspec.json.encode(result) + b"\n")
        self._report(result)

    def _write_picture(self, number: int, happened: Happened) -> str | None:
        if self._out is None:
            return None
        name = f"{self._source}.events/{number:04}-{happened.event.name}.jpg"
        with writing(self._out / name):
            write_whole(self._out / name, happened.picture, durable=False)
        return name
