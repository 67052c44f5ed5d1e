"""The plan of `vlora stream`: cameras, what is asked about each, and events that ask further questions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from apps.video_analytics.sink_plan import NAME, SinkPlan
from vlora.plan_files.fields import Number, PlanModel, PlanPath, Whole

RATE = 1.0
"""Answers per second of a task without a rate."""

_MOST_TOKENS = 4096

Share = Annotated[Number, Field(ge=0, le=1)]
Point = tuple[Share, Share]
"""x and y as shares of the picture's width and height, from the left upper corner."""

Rate = Annotated[Number, Field(gt=0, le=1000)]


class TaskPlan(PlanModel):
    """A head, or a question in words, that is asked about a camera's clips.

    head: ADAPTER/HEAD, or DOMAIN/HEAD. question: answered in words about one frame by `adapter` (an adapter or a
    domain), by the base model without one, in at most `max_tokens` tokens. rate: answers per second; None for the
    camera's. track: follow the objects that a detection head finds, on every frame of the camera.
    """

    head: str | None = Field(None, pattern=r"^[^/].*/[^/]+$")
    question: str | None = Field(None, pattern=r"\S")
    adapter: str | None = Field(None, min_length=1)
    rate: Rate | None = None
    max_tokens: Whole = Field(64, ge=1, le=_MOST_TOKENS)
    track: bool = False

    @model_validator(mode="after")
    def _head_or_question(self) -> TaskPlan:
        if (self.head is None) == (self.question is None):
            raise ValueError("needs exactly one of `head` (ADAPTER/HEAD) and `question`")
        if self.head is not None and (unused := {"adapter", "max_tokens"} & self.model_fields_set):
            raise ValueError(f"`{min(unused)}` is for a `question`; a head is ADAPTER/HEAD and answers in one pass")
        if self.question is not None and self.track:
            raise ValueError("`track` is for a detection `head`, not for a `question`")
        return self

    @property
    def name(self) -> str:
        """The head, or the question with its adapter, for messages."""
        if self.head is not None:
            return self.head
        return f'"{self.question}" of {"the base model" if self.adapter is None else self.adapter}'


class Condition(PlanModel):
    """When an event happens: at the first answer for which all of this holds, and again after one for which it does
    not.

    head: the task that is read. label: of the answer; for a detection, of the objects that count. confidence: at least
    this; of each object, for a detection. over, under: bounds of the count, or of the number of objects, that it
    exceeds or is below. crosses: a line from point to point; each tracked object is an event when its centre crosses
    it. enters: corners of an area; each tracked object is an event when its centre enters it.
    """

    head: str
    label: str | None = Field(None, min_length=1)
    confidence: Share = 0.0
    over: Whole | None = Field(None, ge=0)
    under: Whole | None = Field(None, ge=1)
    crosses: tuple[Point, Point] | None = None
    enters: tuple[Point, ...] | None = Field(None, min_length=3, max_length=100)

    @model_validator(mode="after")
    def _one_kind(self) -> Condition:
        counts = self.over is not None or self.under is not None
        places = [name for name in ("crosses", "enters") if getattr(self, name) is not None]
        if len(places) + counts > 1:
            raise ValueError("has several of `over` or `under`, `crosses` and `enters`; an event needs one of them")
        if not (places or counts or self.label is not None or self.confidence):
            raise ValueError("has no `label`, `confidence`, `over`, `under`, `crosses` or `enters`; an event needs one")
        if self.crosses is not None and self.crosses[0] == self.crosses[1]:
            raise ValueError("`crosses` is a line between two different points")
        return self

    @property
    def needs_tracks(self) -> bool:
        return self.crosses is not None or self.enters is not None


class EventQuestion(PlanModel):
    """A question in words about the frame at which an event happens. adapter: None for the base model."""

    question: str = Field(pattern=r"\S")
    adapter: str | None = Field(None, min_length=1)
    max_tokens: Whole = Field(64, ge=1, le=_MOST_TOKENS)


class Verification(EventQuestion):
    """A question. Its answer must begin with the words of `expect`, in any case, for the event to be sent to sinks."""

    expect: str = Field(pattern=r"\w")

    def holds(self, answer: str) -> bool:
        expected, words = (re.findall(r"\w+", text.casefold()) for text in (self.expect, answer))
        return words[: len(expected)] == expected


class EventPlan(PlanModel):
    """An event. verify: asked before `ask`, which is asked of verified events only. pause_s: after an event, further
    ones of the same name are ignored for this long.
    """

    name: str = Field(max_length=60, pattern=NAME)
    when: Condition
    verify: Verification | None = None
    ask: EventQuestion | None = None
    pause_s: Number = Field(0.0, ge=0)


class ClipPlan(PlanModel):
    """A clip and a snapshot of each event. before_s, after_s: of the clip, around the event. buffer_mib: pictures in
    memory. max_mib, days: bounds on the folder CAMERA.events: the oldest files are deleted.
    """

    before_s: Number = Field(5.0, ge=0, le=60)
    after_s: Number = Field(5.0, ge=0, le=60)
    buffer_mib: Number = Field(32.0, gt=0)
    max_mib: Number = Field(1024.0, gt=0)
    days: Number = Field(7.0, gt=0)


class CameraPlan(PlanModel):
    """One source of frames.

    name: of its result files. source: a file or folder, relative to the plan's folder; a camera number; or a URL.
    rate: answers per second of tasks without their own; None for one per second. max_latency_s: bound on each answer.
    clips: None for events without. sinks: of its events, beside those of the plan.
    """

    name: str = Field(max_length=60, pattern=NAME)
    source: str = Field(min_length=1)
    rate: Rate | None = None
    max_latency_s: Number | None = Field(None, gt=0)
    tasks: tuple[TaskPlan, ...] = Field(min_length=1)
    events: tuple[EventPlan, ...] = ()
    clips: ClipPlan | None = None
    sinks: tuple[SinkPlan, ...] = ()

    @field_validator("source", mode="before")
    @classmethod
    def _number_as_text(cls, source: object) -> object:
        """A camera's number may be written without quotes."""
        return str(source) if isinstance(source, int) and not isinstance(source, bool) and source >= 0 else source

    @field_validator("source")
    @classmethod
    def _from_plan(cls, source: str, info: ValidationInfo) -> str:
        folder: Path | None = (info.context or {}).get("folder")
        return source if folder is None or not is_path(source) else str(folder / source)


class StreamPlan(PlanModel):
    """All cameras. out: folder of the result files, relative to the plan's folder; None writes no files. sinks: of the
    events of all cameras.
    """

    out: PlanPath | None = None
    sinks: tuple[SinkPlan, ...] = ()
    cameras: tuple[CameraPlan, ...] = Field(min_length=1)


def is_path(source: str) -> bool:
    """Whether a source is a file or a folder, not a camera's number or a URL."""
    return not source.isdecimal() and re.match(r"\w+://", source) is None
