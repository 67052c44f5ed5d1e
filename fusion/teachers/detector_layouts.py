"""Output layouts of exported detectors, and their boxes.

A layout is recognised by the shapes of the outputs and the number of labels. Outputs that fit no
layout, or several, are rejected with their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

LayoutName = Literal["anchor_free", "objectness", "end_to_end", "separate"]

DESCRIPTIONS: dict[LayoutName, str] = {
    "anchor_free": "[1, 4 + labels, anchors] (YOLOv8, YOLO11)",
    "objectness": "[1, anchors, 5 + labels] (YOLOv5, YOLOv7)",
    "end_to_end": "[1, boxes, 6] of edges, score, class (YOLOv10, or with suppression in the file)",
    "separate": "boxes [n, 4], scores [n] and labels [n] (torchvision, SSD)",
}


class RawBoxes(NamedTuple):
    """Boxes of one picture. edges: left, top, right, bottom in pixels of the input, or as shares of it [n, 4].
    scores: [n]. classes: int64 [n]."""

    edges: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


class Output(NamedTuple):
    name: str
    values: np.ndarray


def recognise(outputs: Sequence[Output], num_labels: int, chosen: LayoutName | None) -> LayoutName:
    """The layout of a model's outputs.

    Args:
        chosen: the plan's layout, which must fit; None if it sets none.

    Raises:
        ValueError: no layout fits, or several do and the plan chooses none.
    """
    shapes = [output.values.shape for output in outputs]
    shown = ", ".join(f"{output.name} {list(output.values.shape)}" for output in outputs)
    fitting = _fitting(shapes, num_labels)
    if chosen in fitting:
        return chosen
    if len(fitting) == 1 and chosen is None:
        return fitting[0]
    if len(fitting) > 1 and chosen is None:
        raise ValueError(f"its outputs {shown} fit {' and '.join(fitting)}; set `layout` to one of them")
    counted = _labels_that_would_fit(shapes)
    hint = f"; they would fit {counted}" if counted else ""
    if chosen is not None:
        raise ValueError(f"its outputs {shown} do not fit {num_labels} labels in {DESCRIPTIONS[chosen]}{hint}")
    known = "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items())
    raise ValueError(f"its outputs {shown} fit no supported layout with {num_labels} labels{hint}. Supported: {known}")


def _fitting(shapes: Sequence[tuple[int, ...]], num_labels: int) -> list[LayoutName]:
    if len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][0] == 1:
        _, rows, columns = shapes[0]
        fits: dict[LayoutName, bool] = {
            "anchor_free": rows == 4 + num_labels,
            "objectness": columns == 5 + num_labels,
            "end_to_end": columns == 6,
        }
        return [name for name, fit in fits.items() if fit]
    return ["separate"] if _is_separate(shapes) else []


def _labels_that_would_fit(shapes: Sequence[tuple[int, ...]]) -> str:
    """The number of labels with which one output would be a head over anchors, of which there are more than rows."""
    if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][0] != 1:
        return ""
    _, rows, columns = shapes[0]
    name, count = ("anchor_free", rows - 4) if rows < columns else ("objectness", columns - 5)
    return f"{count} label{'s' * (count > 1)} as {name}" if count > 0 else ""


def _is_separate(shapes: Sequence[tuple[int, ...]]) -> bool:
    return any(_is_boxes(shape, shapes) for shape in shapes)


def _is_boxes(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether it is [n, 4] or [1, n, 4], beside two or more outputs without the last dimension."""
    flat = shape[:-1]
    return shape[-1:] == (4,) and (len(flat) == 1 or (len(flat) == 2 and flat[0] == 1)) and shapes.count(flat) >= 2


def raw_boxes(layout: LayoutName, outputs: Sequence[Output], minimum: float) -> RawBoxes:
    """The boxes with a score of at least `minimum`, before suppression.

    Raises ValueError for scores outside 0 to 1, which are logits, and for outputs of another layout.
    """
    found = _READ[layout](outputs)
    if not len(found.scores):
        return found
    # Comparisons with NaN are false: such boxes are dropped below.
    low, high = float(np.nanmin(found.scores, initial=0.0)), float(np.nanmax(found.scores, initial=0.0))
    if low < -1e-3 or high > 1 + 1e-3:
        raise ValueError(f"its scores are from {low:.3g} to {high:.3g}; expected 0 to 1: export the model with sigmoid")
    kept = (found.scores >= minimum) & np.isfinite(found.edges).all(1)
    return RawBoxes(found.edges[kept], found.scores[kept], found.classes[kept])


def _anchor_free(outputs: Sequence[Output]) -> RawBoxes:
    """Centre, size and a score for each label of every anchor, [1, 4 + labels, anchors]."""
    rows = outputs[0].values[0].astype(np.float64).T
    return _best_label(_edges(rows[:, :4]), rows[:, 4:])


def _objectness(outputs: Sequence[Output]) -> RawBoxes:
    """Centre, size, objectness and a score for each label of every anchor, [1, anchors, 5 + labels]."""
    rows = outputs[0].values[0].astype(np.float64)
    return _best_label(_edges(rows[:, :4]), rows[:, 5:] * rows[:, 4:5])


def _end_to_end(outputs: Sequence[Output]) -> RawBoxes:
    """Edges, score and class, [1, boxes, 6]; a file with a fixed number of boxes pads with scores of zero."""
    rows = outputs[0].values[0].astype(np.float64)
    return RawBoxes(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64))


def _separate(outputs: Sequence[Output]) -> RawBoxes:
    """Edges [n, 4], and a score and a class each [n]."""
    shapes = [output.values.shape for output in outputs]
    edges = next(output.values for output in outputs if _is_boxes(output.values.shape, shapes))
    flat = {output.name: output.values.ravel() for output in outputs if output.values.shape == edges.shape[:-1]}
    classes = flat.pop(_name_of_classes(flat))
    scores = flat[next((name for name in flat if "score" in name.lower()), next(iter(flat)))]
    return RawBoxes(edges.reshape(-1, 4).astype(np.float64), scores.astype(np.float64), classes.astype(np.int64))


def _name_of_classes(flat: Mapping[str, np.ndarray]) -> str:
    """The integer output, else one named label or class, else the last one."""
    whole = [name for name, values in flat.items() if values.dtype.kind in "iu"]
    named = [name for name in flat if "label" in name.lower() or "class" in name.lower()]
    return (whole or named or list(flat))[-1]


def _best_label(edges: np.ndarray, scores: np.ndarray) -> RawBoxes:
    classes = scores.argmax(1)
    return RawBoxes(edges, scores[np.arange(len(scores)), classes], classes)


def _edges(centres: np.ndarray) -> np.ndarray:
    """(x, y, width, height) of centred boxes to (left, top, right, bottom)."""
    half = centres[:, 2:] / 2
    return np.concatenate([centres[:, :2] - half, centres[:, :2] + half], 1)


_READ = {
    "anchor_free": _anchor_free,
    "objectness": _objectness,
    "end_to_end": _end_to_end,
    "separate": _separate,
}
SUPPRESSED: frozenset[LayoutName] = frozenset({"end_to_end", "separate"})
"""Layouts after suppression."""
