"""Conversion of task head results: boxes in pixels, and the JSON of the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vlora.client.values import HeadResult
from vlora.models.vision.images import Region
from vlora.types import FoundBox, HeadAnswer


def in_pixels(answer: HeadAnswer, shown: Sequence[Region]) -> HeadAnswer:
    """The result with box edges in pixels, clipped to the image. shown: the part of each image that the model saw."""
    if not answer.boxes:
        return answer
    boxes = tuple(_in_pixels(box, shown[box.image]) for box in answer.boxes)
    return msgspec.structs.replace(answer, boxes=boxes)


def _in_pixels(box: FoundBox, shown: Region) -> FoundBox:
    left, right = (shown.left + shown.width * min(1.0, max(0.0, edge)) for edge in (box.left, box.right))
    top, bottom = (shown.top + shown.height * min(1.0, max(0.0, edge)) for edge in (box.top, box.bottom))
    return msgspec.structs.replace(box, left=left, top=top, right=right, bottom=bottom)


def head_json(result: HeadResult) -> dict[str, Any]:
    """The JSON object of one result, with labels in place of label numbers."""
    form: dict[str, Any] = {
        "adapter": result.adapter,
        "head": result.head,
        "task": result.task,
        "label": result.label,
        "confidence": result.confidence,
        "total_s": result.total_s,
    }
    if result.label_id is not None:
        form["label_id"] = result.label_id
    if result.scores:
        form["scores"] = dict(zip(result.labels, result.scores, strict=True))
    match result.task:
        case "counting":
            form["count"] = result.count
        case "multi_label":
            form["chosen"] = [result.labels[label_id] for label_id in result.chosen]
        case "regression":
            form["values"] = dict(zip(result.labels, result.values, strict=True))
            form["deviations"] = dict(zip(result.labels, result.deviations, strict=True))
        case "detection":
            form["boxes"] = [msgspec.structs.asdict(box) for box in result.boxes]
    return form
