"""`vlora stream plan.yaml --check`: what a plan asks per second, without a server."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from apps.video_analytics.plan.schema import RATE, CameraPlan, Condition, EventPlan, StreamPlan, TaskPlan
from apps.video_analytics.sources import without_password


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
