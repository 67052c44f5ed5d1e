"""Reading a stream plan: errors of its fields, and of the fields together, with file, line and field."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from apps.video_analytics.asked import by_name, find_head, unknown
from apps.video_analytics.plan.schema import CameraPlan, Condition, StreamPlan, TaskPlan, is_path
from apps.video_analytics.sink_plan import SinkPlan
from apps.video_analytics.sources import find_sources
from vlora.errors import BadImage, BadRequest, listed
from vlora.plan_files.errors import PlanErrors, PlanText
from vlora.plan_files.reading import checked, read_model
from vlora.types import AdapterStatus, composed_of


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan with the text it was read from, so that later errors can be reported with their line."""

    plan: StreamPlan
    text: PlanText


def read_plan(path: Path | str) -> PlanFile:
    """Read and check a plan file. Raises BadPlan with file, line and field of every error."""
    return _checked(*read_model(path, StreamPlan, needed="cameras"))


def plan_of(camera: Mapping[str, Any]) -> PlanFile:
    """A plan of one camera, whose description was no file. Raises BadPlan with the field of every error."""
    text = PlanText()
    return _checked(checked({"cameras": [camera]}, StreamPlan, text), text)


def _checked(plan: StreamPlan, text: PlanText) -> PlanFile:
    errors = PlanErrors(text)
    names: set[str] = set()
    _check_sinks(plan.sinks, {event.name for camera in plan.cameras for event in camera.events}, errors)
    for place, camera in enumerate(plan.cameras):
        here = errors.inside("cameras", place)
        # Result files of names that differ in case only are one file on some systems.
        if camera.name.lower() in names:
            here.add(f"two cameras are named {camera.name!r}; names must be unique", "name")
        names.add(camera.name.lower())
        _check_camera(camera, here)
    errors.raise_if_any()
    return PlanFile(plan, text)


def check_sources(file: PlanFile) -> None:
    """Check that the files and folders of a plan exist. Raises BadPlan.

    A run does not check them first: it reports a source that cannot be read, and goes on with the others.
    """
    errors = PlanErrors(file.text)
    for place, camera in enumerate(file.plan.cameras):
        if is_path(camera.source) and not os.path.exists(camera.source):
            errors.inside("cameras", place).add(f"no such file or folder: {camera.source!r}", "source")
    errors.raise_if_any()


def check_server(file: PlanFile, statuses: Sequence[AdapterStatus]) -> None:
    """Check a plan against the adapters of a server. Raises BadPlan with the line of each that it does not have."""
    known = by_name(statuses)
    errors = PlanErrors(file.text)
    for place, camera in enumerate(file.plan.cameras):
        here = errors.inside("cameras", place)
        for number, task in enumerate(camera.tasks):
            if task.head is not None:
                _check_head(known, task, here.inside("tasks", number))
            else:
                _check_adapter(known, task.adapter, here.inside("tasks", number))
        for number, event in enumerate(camera.events):
            _check_condition(known, event.when, here.inside("events", number, "when"))
            for field, question in (("verify", event.verify), ("ask", event.ask)):
                if question is not None:
                    _check_adapter(known, question.adapter, here.inside("events", number, field))
    errors.raise_if_any()


def _check_camera(camera: CameraPlan, errors: PlanErrors) -> None:
    if is_path(camera.source) and os.path.isdir(camera.source) and (why := _why_no_folder(camera.source)):
        errors.add(why, "source")
    asked: set[tuple[str | None, ...]] = set()
    for number, task in enumerate(camera.tasks):
        what = (task.head, task.question, task.adapter)
        if what in asked:
            errors.add(f"{task.name} is given more than once; give it once", "tasks", number)
        asked.add(what)
    tasks = {task.head: task for task in camera.tasks if task.head is not None}
    names: set[str] = set()
    for number, event in enumerate(camera.events):
        here = errors.inside("events", number)
        if event.name in names:
            here.add(f"two events of camera {camera.name!r} are named {event.name!r}; names must be unique", "name")
        names.add(event.name)
        read = tasks.get(event.when.head)
        if read is None:
            known = ", ".join(tasks) or "none"
            here.add(f"no task of camera {camera.name!r} is {event.when.head!r}; its heads: {known}", "when", "head")
        elif event.when.needs_tracks and not read.track:
            field = "crosses" if event.when.crosses is not None else "enters"
            here.add(f"needs tracked objects; add `track: true` to task {read.head}", "when", field)
    _check_sinks(camera.sinks, names, errors)


def _check_sinks(sinks: Sequence[SinkPlan], events: Collection[str], errors: PlanErrors) -> None:
    """events: names of those that the sinks may be sent."""
    names: set[str] = set()
    for number, sink in enumerate(sinks):
        here = errors.inside("sinks", number)
        if sink.name in names:
            here.add(f"two sinks are named {sink.name!r}; names must be unique", "name")
        names.add(sink.name)
        for place, name in enumerate(sink.events):
            if name not in events:
                here.add(f"no event is named {name!r}; there are: {listed(events)}", "events", place)


def _why_no_folder(folder: str) -> str | None:
    """Why a folder is not one source of frames."""
    try:
        found = find_sources([folder])
    except BadImage as error:
        return str(error)
    if len(found) == 1:
        return None
    videos = sum(source.kind == "file" for source in found)
    counts = f"{videos} video{'s' * (videos != 1)}{' and pictures' * (videos < len(found))}"
    return f"a camera is one video, or one folder of pictures; {folder!r} has {counts}"


def _check_head(known: dict[str, AdapterStatus], task: TaskPlan, errors: PlanErrors) -> None:
    assert task.head is not None
    try:
        _, head = find_head(known, (), task.head)
    except BadRequest as error:
        errors.add(str(error), "head")
        return
    if task.track and head.task != "detection":
        errors.add(f"only objects of a detection can be tracked; head {task.head} is for {head.task}", "track")
    elif task.track and head.num_frames != 1:
        errors.add(
            f"head {task.head} reads {head.num_frames} frames at once; objects are tracked from one frame", "track"
        )


def _check_condition(known: dict[str, AdapterStatus], when: Condition, errors: PlanErrors) -> None:
    try:
        _, head = find_head(known, (), when.head)
    except BadRequest:
        return  # reported at the task
    if (when.over is not None or when.under is not None) and head.task not in ("counting", "detection"):
        errors.add(f"head {when.head} does not count; `over` and `under` are for counting and detection")
    if when.label is not None and head.task != "counting" and when.label not in head.labels:
        errors.add(f"head {when.head} has no label {when.label!r}; its labels: {', '.join(head.labels)}", "label")


def _check_adapter(known: dict[str, AdapterStatus], adapter: str | None, errors: PlanErrors) -> None:
    try:
        parts = [] if adapter is None else [part.adapter for part in composed_of(adapter)]
    except BadRequest as error:
        errors.add(str(error), "adapter")
        return
    for part in parts:
        if part not in known:
            errors.add(str(unknown(part, known)), "adapter")
