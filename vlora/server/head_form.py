"""A task head's answer as the HTTP API says it: what every task has in common, and what this one has of its own."""

from __future__ import annotations

from typing import Any

import msgspec

from vlora.client.values import HeadResult


def head_form(result: HeadResult) -> dict[str, Any]:
    """The JSON object of one answer; labels instead of their numbers as far as they tell things apart."""
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
