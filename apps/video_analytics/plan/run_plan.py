"""Runs a plan: all cameras at once, with tracks and events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from apps.video_analytics.analysis import Analysis, Job
from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.asked import Asked, Group, by_name, find_head, grouped, name_of
from apps.video_analytics.plan.events import EventQuestions, EventWatch
from apps.video_analytics.plan.plan_file import PlanFile, check_server
from apps.video_analytics.plan.schema import RATE, CameraPlan, Condition, EventPlan, StreamPlan, TaskPlan
from apps.video_analytics.result_files import ResultFiles
from apps.video_analytics.sampling import Chunk, ClipShape
from apps.video_analytics.sink_plan import EventResult
from apps.video_analytics.sinks import Sinks, open_sinks
from apps.video_analytics.sources import SourceHealth, find_sources, without_password
from apps.video_analytics.tracking import ObjectTracker, TrackedFrame
from vlora.client import Client
from vlora.types import AdapterStatus


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A task, with its answers per second. max_tokens: of an answer in words; 0 for a head."""

    asked: str
    per_s: float
    max_tokens: int
    tracked: bool


class CameraSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A camera with its tasks, and its events in words. source: without password."""

    name: str
    source: str
    tasks: tuple[TaskSummary, ...]
    events: tuple[str, ...]


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its totals per second, events not counted: heads, answers in words, and the most tokens of these."""

    cameras: tuple[CameraSummary, ...]
    heads_per_s: float
    texts_per_s: float
    max_tokens_per_s: float


def summarize(plan: StreamPlan) -> PlanSummary:
    """Summarize the questions of a plan."""
    cameras = tuple(
        CameraSummary(
            name=camera.name,
            source=without_password(camera.source),
            tasks=tuple(_task(camera, task) for task in camera.tasks),
            events=tuple(map(_event, camera.events)),
        )
        for camera in plan.cameras
    )
    tasks = [task for camera in cameras for task in camera.tasks]
    return PlanSummary(
        cameras=cameras,
        heads_per_s=sum(task.per_s for task in tasks if not task.max_tokens),
        texts_per_s=sum(task.per_s for task in tasks if task.max_tokens),
        max_tokens_per_s=sum(task.per_s * task.max_tokens for task in tasks),
    )


def lines(summary: PlanSummary) -> Iterator[str]:
    """The summary as text."""
    for camera in summary.cameras:
        yield f"camera {camera.name}: {camera.source}"
        width = max(len(task.asked) for task in camera.tasks)
        for task in camera.tasks:
            words = f", each of up to {task.max_tokens} tokens" if task.max_tokens else ""
            tracked = ", objects followed on every frame" if task.tracked else ""
            yield f"  {task.asked:<{width}}  {_answers(task.per_s)} per second{words}{tracked}"
        yield from (f"  {event}" for event in camera.events)
    heads, texts, tokens = summary.heads_per_s, summary.texts_per_s, summary.max_tokens_per_s
    words = f", {texts:g} in words of up to {tokens:g} tokens" if texts else ""
    count = len(summary.cameras)
    total = f"{_answers(heads + texts)} per second, {heads:g} of heads{words}"
    num_events = sum(len(camera.events) for camera in summary.cameras)
    events = f"; {num_events} event{'s' * (num_events != 1)} in addition" if num_events else ""
    yield f"{count} camera{'s' * (count != 1)}: {total}{events}"


def _answers(per_s: float) -> str:
    return f"{per_s:g} answer{'s' * (per_s != 1)}"


def _task(camera: CameraPlan, task: TaskPlan) -> TaskSummary:
    rate = camera.rate if task.rate is None else task.rate
    return TaskSummary(
        asked=task.name,
        per_s=RATE if rate is None else rate,
        max_tokens=0 if task.question is None else task.max_tokens,
        tracked=task.track,
    )


def _event(event: EventPlan) -> str:
    text = f"event {event.name}: {_condition(event.when)}"
    if event.verify is not None:
        text = f'{text}; verified by "{event.verify.question}" of {event.verify.adapter or "the base model"}'
    if event.ask is None:
        return text
    return f'{text}; asks "{event.ask.question}" of {event.ask.adapter or "the base model"}'


def _condition(when: Condition) -> str:
    sure = f" at {when.confidence:.0%}" if when.confidence else ""
    objects = f"{when.label or 'object'}{sure}"
    if when.crosses is not None:
        return f"{objects} of {when.head} crosses the line"
    if when.enters is not None:
        return f"{objects} of {when.head} enters the area"
    bounds = [f"{word} {bound}" for word, bound in (("over", when.over), ("under", when.under)) if bound is not None]
    if bounds:
        label = f" of {when.label}" if when.label else ""
        return f"{when.head} counts {' and '.join(bounds)}{label}{sure}"
    return f"{when.head} is {when.label or 'sure'}{sure}"


class PlanCounts(NamedTuple):
    """answers: by CAMERA.TASK. events: by camera. objects: by CAMERA.TASK of tracked heads, and by label."""

    answers: dict[str, int]
    events: dict[str, int]
    objects: dict[str, dict[str, int]]


def run_plan(
    client: Client,
    file: PlanFile,
    *,
    out: Path | None = None,
    sinks: Path | None = None,
    max_latency_s: float | None = None,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
    on_result: Callable[[ChunkResult], None] = lambda result: None,
    on_event: Callable[[EventResult], None] = lambda event: None,
    say: Callable[[str], None] = lambda text: None,
    health: Mapping[str, SourceHealth] = {},
) -> PlanCounts:
    """Analyse all cameras of a plan concurrently until they end or `stop` is set.

    Args:
        out: folder of the result files, instead of the plan's.
        sinks: folder of the sinks, instead of that of the results.
        max_latency_s: of cameras without their own.
        wait_s, stop, on_result, say: see `run`.
        on_event: called with each event after the answer to its question, from several threads.
        health: of cameras by name, where it is noted.

    Raises:
        BadPlan: the server does not have an adapter or a head; each with its line.
        BadConfig: a folder cannot be made or is missing, or a sink cannot be started.
        VLoraError: after all cameras have ended, the first error that ended one.
    """
    out = out or file.plan.out
    analysis = Analysis(client, out, wait_s=wait_s, stop=stop, on_result=on_result, say=say)
    statuses = client.adapters()
    check_server(file, statuses)
    counts, cameras = PlanCounts({}, {}, {}), file.plan.cameras
    with contextlib.ExitStack() as scope:
        sending = scope.enter_context(open_sinks(sinks or out, cameras, file.plan.sinks, analysis.print_line))
        common = analysis, counts, statuses, sending, on_event, max_latency_s
        jobs = [scope.enter_context(_camera_job(each, *common, health.get(each.name))) for each in cameras]
        counts.answers.update(analysis.run(jobs))
    return counts


@contextlib.contextmanager
def _camera_job(
    camera: CameraPlan,
    analysis: Analysis,
    counts: PlanCounts,
    statuses: Sequence[AdapterStatus],
    sinks: Sinks,
    on_event: Callable[[EventResult], None],
    max_latency_s: float | None,
    health: SourceHealth | None,
) -> Iterator[Job]:
    """The work on a camera; its last events are complete at the end of the block."""
    (source,) = find_sources([camera.source])  # a folder was checked with the plan
    questions = EventQuestions(camera, analysis, sinks, on_event)
    try:
        yield Job(
            source._replace(name=camera.name, health=health),
            lambda: camera_groups(camera, statuses),
            max_latency_s if camera.max_latency_s is None else camera.max_latency_s,
            own_names=False,
            files=lambda asked, base: _TaskFiles(camera, analysis, counts, questions, asked, base),
        )
    finally:
        questions.close()
        counts.events[camera.name] = questions.num_events


class _TaskFiles(ResultFiles):
    """Follows the objects of a head, writes its files, and watches for its events."""

    def __init__(
        self,
        camera: CameraPlan,
        analysis: Analysis,
        counts: PlanCounts,
        questions: EventQuestions,
        asked: Asked,
        base: Path | None,
    ) -> None:
        super().__init__(base, tracked=asked.tracked)
        self._name, self._analysis = f"{camera.name}.{asked.name}", analysis
        self._counts, self._questions = counts, questions
        self._tracker = ObjectTracker() if asked.tracked else None
        events = camera.events if asked.head else ()
        self._watches = [EventWatch(event) for event in events if event.when.head == f"{asked.adapter}/{asked.head}"]

    def add(self, clip: Chunk, result: ChunkResult, frames: Sequence[TrackedFrame] = ()) -> ChunkResult:
        """frames: found here."""
        if self._tracker is not None:
            frames = self._tracker.follow(clip, result)
            if result.answer is not None:
                result = msgspec.structs.replace(result, tracks=self._tracker.detected)
        super().add(clip, result, frames)
        if self._tracker is not None:
            self.add_tracks(self._tracker.ended)
            self._tracker.ended.clear()
        self._questions.keep(clip)
        for watch in self._watches:
            for happened in watch.see(clip, result, frames):
                self._questions.add(happened, clip, result)
        return result

    def __exit__(self, *exc: object) -> None:
        try:
            if self._tracker is not None:
                self._tracker.close()
                self.add_tracks(self._tracker.ended)
                counts = self._tracker.counts
                self._counts.objects[self._name] = dict(counts)
                by_label = ", ".join(f"{count} {label}" for label, count in sorted(counts.items()))
                objects = f"{counts.total()} object{'s' * (counts.total() != 1)}"
                self._analysis.print_line(f"{self._name}: {objects}{by_label and f': {by_label}'}")
        finally:
            super().__exit__(*exc)


def camera_groups(camera: CameraPlan, statuses: Sequence[AdapterStatus]) -> list[Group]:
    """The heads and questions of a camera, grouped into streams.

    Raises:
        VLoraError: the server does not have an adapter or a head.
    """
    known = by_name(statuses)
    several = len({task.head.rpartition("/")[0] if task.head else task.adapter for task in camera.tasks}) > 1
    asked, shapes = [], []
    for task in camera.tasks:
        rate = camera.rate if task.rate is None else task.rate
        if task.head is not None:
            adapter, head = find_head(known, (), task.head)
            asked.append(Asked(name_of(adapter, head, several), adapter, head.name, tracked=task.track))
            shapes.append(_shape(head.num_frames, RATE if rate is None and task.track else rate, task.track))
        else:
            assert task.question is not None
            name = f"{task.adapter}-{task.question}" if several and task.adapter else task.question
            asked.append(Asked(name, task.adapter, question=task.question, max_tokens=task.max_tokens))
            shapes.append(_shape(1, rate, False))
    # Tasks beside a tracked one share its frames.
    tracked = {shape._replace(every_frame=False): shape for shape in shapes if shape.every_frame}
    return grouped(asked, [tracked.get(shape, shape) for shape in shapes], reserved=("events",))


def _shape(num_frames: int, rate: float | None, tracked: bool) -> ClipShape:
    """Clips of `rate` per second, with their frames at equal distances; None for one per second."""
    return ClipShape(num_frames, None if rate is None else num_frames * rate, tracked)
