"""Output layouts of exported detectors, and their boxes.

A layout is recognised by the shapes of the outputs, the number of labels and the numbers on a grey picture, which
disprove layouts: a class is a whole number, and a share is at most 1. Outputs that fit no layout, or several, are
rejected with their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

LayoutName = Literal["anchor_free", "objectness", "end_to_end", "separate", "detr"]

DESCRIPTIONS: dict[LayoutName, str] = {
    "anchor_free": "[1, 4 + labels, anchors] (YOLOv8, YOLO11)",
    "objectness": "[1, anchors, 5 + labels] (YOLOv5, YOLOv7)",
    "end_to_end": "[1, boxes, 6] of edges, score, class (YOLOv10, or with suppression in the file)",
    "separate": "boxes [n, 4], scores [n] and labels [n] (torchvision, SSD)",
    "detr": "[1, queries, 4 + labels] of centre and size as shares, and scores; or boxes [1, queries, 4] and logits "
    "[1, queries, labels or labels + 1] (RT-DETR, DETR)",
}
_MOST_OF_A_SHARE = 1.5  # boxes at the border of a picture may extend beyond it


class RawBoxes(NamedTuple):
    """Boxes of one picture. edges: left, top, right, bottom in pixels of the input, or as shares of it [n, 4].
    scores: [n]. classes: int64 [n]. shares: whether edges are shares."""

    edges: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    shares: bool = False


class Output(NamedTuple):
    name: str
    values: np.ndarray


def recognise(
    outputs: Sequence[Output],
    num_labels: int,
    chosen: LayoutName | None,
    *,
    shares: bool | None = None,
    hint: LayoutName | None = None,
) -> LayoutName:
    """The layout of a model's outputs.

    Args:
        chosen: the plan's layout, which must fit; None if it sets none.
        shares: whether the plan says that boxes are shares; None if it does not say.
        hint: what the file's metadata says, which decides between layouts that fit.

    Raises:
        ValueError: no layout fits, or several do and neither plan nor metadata choose.
    """
    shown = ", ".join(f"{output.name} {list(output.values.shape)}" for output in outputs)
    fitting = _fitting(outputs, num_labels, chosen, shares)
    if chosen in fitting:
        return chosen
    if chosen is None and (len(fitting) == 1 or hint in fitting):
        return fitting[0] if len(fitting) == 1 or hint is None else hint
    if chosen is None and fitting:
        raise ValueError(f"its outputs {shown} fit {' and '.join(fitting)}; set `layout` to one of them")
    counted = _labels_that_would_fit(outputs)
    advice = f"; they would fit {counted}" if counted else ""
    if chosen is not None:
        raise ValueError(f"its outputs {shown} do not fit {num_labels} labels in {DESCRIPTIONS[chosen]}{advice}")
    known = "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items())
    raise ValueError(
        f"its outputs {shown} fit no supported layout with {num_labels} labels{advice}. Supported: {known}"
    )


def _fitting(
    outputs: Sequence[Output], num_labels: int, chosen: LayoutName | None, shares: bool | None
) -> list[LayoutName]:
    shapes = [output.values.shape for output in outputs]
    if not _is_one_table(shapes):
        fits: dict[LayoutName, bool] = {
            "separate": any(_is_boxes(shape, shapes) for shape in shapes),
            "detr": len(_pairs(outputs, num_labels)) == 1,
        }
        return [name for name, fit in fits.items() if fit]
    rows = outputs[0].values[0].astype(np.float64)
    in_shares = rows.any() and _are_shares(rows[:, :4])
    fits = {
        "anchor_free": len(rows) == 4 + num_labels,
        # Shares would rather be an RT-DETR file of one more label.
        "objectness": rows.shape[1] == 5 + num_labels and bool(not in_shares or shares or chosen),
        "end_to_end": rows.shape[1] == 6 and _may_be_end_to_end(rows),
        "detr": rows.shape[1] == 4 + num_labels and (_are_shares(rows[:, :4]) or shares is False or chosen == "detr"),
    }
    if fits["end_to_end"] and not rows[:, :4].any():  # padding; queries always have a size
        fits["detr"] = fits["objectness"] = False
    return [name for name, fit in fits.items() if fit]


def _is_one_table(shapes: Sequence[tuple[int, ...]]) -> bool:
    return len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][0] == 1


def _are_shares(edges: np.ndarray) -> bool:
    finite = edges[np.isfinite(edges).all(1)]
    return bool((np.abs(finite) <= _MOST_OF_A_SHARE).all())


def _may_be_end_to_end(rows: np.ndarray) -> bool:
    """Whether rows of 6 can be edges in order, a score of at most 1 and a class; the rest may be padding."""
    rows = rows[np.isfinite(rows).all(1)]
    found = rows[rows[:, 4] > 0]
    ordered = (found[:, :2] <= found[:, 2:4]).all()
    return bool(ordered and _are_whole(rows[:, 5]) and (found[:, 4] <= 1 + 1e-3).all())


def _are_whole(classes: np.ndarray) -> bool:
    return bool((np.abs(classes - np.rint(classes)) < 1e-3).all())


def _pairs(outputs: Sequence[Output], num_labels: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Boxes [1, queries, 4] with the scores or logits [1, queries, labels or labels + 1] that may belong to them."""
    tables = [output for output in outputs if _is_one_table([output.values.shape])]
    found = [
        (boxes, classes)
        for boxes in tables
        for classes in tables
        if boxes is not classes
        and boxes.values.shape[1:] == (classes.values.shape[1], 4)
        and classes.values.shape[2] in (num_labels, num_labels + 1)
        and _are_shares(boxes.values[0])
    ]
    named = [pair for pair in found if "box" in pair[0].name.lower() and "box" not in pair[1].name.lower()]
    return [(boxes.values[0], classes.values[0]) for boxes, classes in named or found]


def _labels_that_would_fit(outputs: Sequence[Output]) -> str:
    """The number of labels with which one output would be a head over anchors, of which there are more than rows, or
    over queries."""
    if not _is_one_table([output.values.shape for output in outputs]):
        return ""
    values = outputs[0].values[0]
    rows, columns = values.shape
    name, count = ("anchor_free", rows - 4) if rows < columns else ("objectness", columns - 5)
    if rows >= columns and values.any() and _are_shares(values[:, :4]):
        name, count = "detr", columns - 4
    return f"{count} label{'s' * (count > 1)} as {name}" if count > 0 else ""


def _is_boxes(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether it is [n, 4] or [1, n, 4], beside two or more outputs without the last dimension."""
    flat = shape[:-1]
    return shape[-1:] == (4,) and (len(flat) == 1 or (len(flat) == 2 and flat[0] == 1)) and shapes.count(flat) >= 2


def raw_boxes(
    layout: LayoutName, outputs: Sequence[Output], minimum: float, num_labels: int, shares: bool | None = None
) -> RawBoxes:
    """The boxes with a score of at least `minimum`, before suppression.

    Args:
        shares: whether edges are shares of the input; None to decide by the boxes that have a score.

    Raises ValueError for scores outside 0 to 1, which are logits, and for outputs of another layout.
    """
    found = _detr(outputs, num_labels) if layout == "detr" else _READ[layout](outputs)
    if not len(found.scores):
        return found
    # Comparisons with NaN are false: such boxes are dropped below. Files with a fixed number of boxes may pad with -1.
    scores = found.scores[found.scores != -1]
    low, high = float(np.nanmin(scores, initial=0.0)), float(np.nanmax(scores, initial=0.0))
    if low < -1e-3 or high > 1 + 1e-3:
        raise ValueError(f"its scores are from {low:.3g} to {high:.3g}; expected 0 to 1: export the model with sigmoid")
    in_shares = _are_shares(found.edges[found.scores > 0])
    kept = (found.scores >= minimum) & np.isfinite(found.edges).all(1)
    if not kept.any():
        return RawBoxes(found.edges[kept], found.scores[kept], found.classes[kept].astype(np.int64))
    edges, classes = found.edges[kept], found.classes[kept]
    if not _are_whole(classes):
        wrong = classes[classes != np.rint(classes)][0]
        raise ValueError(f"a box has class {wrong:.3g}, so its outputs are not {DESCRIPTIONS[layout]}; set `layout`")
    if shares is not None and shares != in_shares and (shares or _are_shares(edges)):
        right = "shares" if in_shares else "pixels"
        raise ValueError(f"its boxes have edges up to {edges.max():.4g}, which are {right}; set `boxes: {right}`")
    return RawBoxes(edges, found.scores[kept], classes.astype(np.int64), in_shares if shares is None else shares)


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
    return RawBoxes(rows[:, :4], rows[:, 4], rows[:, 5])


def _separate(outputs: Sequence[Output]) -> RawBoxes:
    """Edges [n, 4], and a score and a class each [n]."""
    shapes = [output.values.shape for output in outputs]
    edges = next(output.values for output in outputs if _is_boxes(output.values.shape, shapes))
    flat = {output.name: output.values.ravel() for output in outputs if output.values.shape == edges.shape[:-1]}
    classes = flat.pop(_name_of_classes(flat))
    scores = flat[next((name for name in flat if "score" in name.lower()), next(iter(flat)))]
    return RawBoxes(edges.reshape(-1, 4).astype(np.float64), scores.astype(np.float64), classes)


def _detr(outputs: Sequence[Output], num_labels: int) -> RawBoxes:
    """Centre and size of each query with a score or logit for each label, and perhaps one for no object at the end.
    With that one, logits are of a softmax; without, of a sigmoid each."""
    if len(outputs) == 1:
        rows = outputs[0].values[0].astype(np.float64)
        boxes, scores = rows[:, :4], rows[:, 4:]
    else:
        pairs = _pairs(outputs, num_labels)
        if len(pairs) != 1:
            raise ValueError(f"its outputs are no longer {DESCRIPTIONS['detr']}")
        boxes, scores = (each.astype(np.float64) for each in pairs[0])
    if ((scores < -1e-3) | (scores > 1 + 1e-3)).any():
        if scores.shape[1] > num_labels:
            powers = np.exp(scores - scores.max(1, keepdims=True))
            scores = powers / powers.sum(1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-np.clip(scores, -700, 700)))
    return _best_label(_edges(boxes), scores[:, :num_labels])


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
