"""Cameras that a server reads: their state, and what the process of one reports."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

import msgspec

from vlora.types.output import ErrorValue
from vlora.types.visibility import WITHOUT_PLACES, admin_only

CameraState = Literal["connecting", "running", "lost", "paused", "ended", "failed"]


class CameraHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What a camera delivers, by the clock. fps: in the last seconds. age_s: of the last frame; None before the first.

    num_problems: answers that failed, and clips that newer ones replaced. error: the last problem, without addresses.
    """

    connected: bool = False
    fps: float = 0.0
    age_s: float | None = None
    num_frames: int = 0
    num_answers: int = 0
    num_problems: int = 0
    num_reconnects: int = 0
    error: Annotated[str | None, WITHOUT_PLACES] = None


class CameraEvent(msgspec.Struct, frozen=True, kw_only=True):
    """text: the answer to the event's question. problem: why there is none."""

    event: str
    time: datetime.datetime
    label: str
    confidence: float
    text: str | None = None
    problem: str | None = None


class CameraStatus(msgspec.Struct, frozen=True):
    """A camera of a server. source: of a URL only scheme, host and port. events: the last ones, the newest first."""

    name: str
    source: Annotated[str, admin_only("hidden")]
    tasks: tuple[str, ...]
    state: CameraState
    health: CameraHealth
    num_events: int = 0
    events: tuple[CameraEvent, ...] = ()


class CameraReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a camera's process; one field is set.

    tasks: the description is accepted. refused: it cannot run. ended: the error that ended reading; empty without one.
    """

    tasks: tuple[str, ...] | None = None
    refused: ErrorValue | None = None
    health: CameraHealth | None = None
    event: CameraEvent | None = None
    ended: str | None = None
