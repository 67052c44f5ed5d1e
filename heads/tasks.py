"""All tasks by kind. Serving needs only the class and the entry of a kind; plans name it in fusion/plan/tasks.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from heads.classification import Action, Binary, Classification, Counting, MultiLabel
from heads.detection import Detection
from heads.regression import Regression
from heads.task import Task

TASKS: dict[str, type[Task]] = {
    task.kind: task for task in (Classification, Action, Binary, Counting, MultiLabel, Regression, Detection)
}


def make_task(kind: str, labels: tuple[str, ...], parameters: Mapping[str, Any]) -> Task:
    """The task of a head's file. Raises ValueError with the invalid field."""
    if kind not in TASKS:
        raise ValueError(f"task is {kind!r}; known: {', '.join(sorted(TASKS))}")
    task: Callable[..., Task] = TASKS[kind]
    fields = {field.name: field for field in dataclasses.fields(TASKS[kind]) if field.name != "labels"}  # type: ignore[arg-type]
    unknown = sorted(parameters.keys() - fields.keys())
    if unknown:
        raise ValueError(f"parameter {unknown[0]!r} is not one of a {kind} head; known: {', '.join(fields)}")
    missing = [name for name, field in fields.items() if name not in parameters and _is_needed(field)]
    if missing:
        raise ValueError(f"a {kind} head needs the parameter {missing[0]!r}")
    return task(labels, **parameters)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
