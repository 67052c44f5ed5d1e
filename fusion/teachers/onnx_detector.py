"""ONNX detectors as teachers, run by onnxruntime and decoded here. No code from the file is run.

The layout of the outputs is recognised by their shapes, the number of labels and the numbers on a grey picture, which
disprove layouts: a class is a whole number, and a share is at most 1. Outputs that fit no layout, or several, are
rejected with their shapes.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from fusion.data.samples import NamedBox
from fusion.plan.teacher_kinds import OnnxDetectorTeacher
from heads.answer import Box, suppress

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_GREY = np.full((64, 64, 3), 114, np.uint8)

_COUNTED = 0.05  # least score of a box that counts as dropped below the plan's minimum confidence
_PADDING = 114  # grey level of the border that Ultralytics trains with

Resize = Literal["letterbox", "stretch"]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A picture within a model's input. left, top, width, height: its edges there, in pixels; the rest is padding."""

    pixels: np.ndarray
    left: int
    top: int
    width: int
    height: int

    def shares(self, boxes: np.ndarray) -> np.ndarray:
        """Edges [n, 4] (left, top, right, bottom) in pixels of the input, as shares of the picture."""
        return (boxes - [self.left, self.top] * 2) / ([self.width, self.height] * 2)


def place(frame: np.ndarray, height: int, width: int, resize: Resize) -> Placed:
    """Resize an RGB picture [h, w, 3] to [height, width, 3].

    "letterbox" keeps the aspect ratio and centres the picture between grey borders. "stretch" does not.
    """
    rows, columns = frame.shape[:2]
    if resize == "stretch":
        return Placed(_resized(frame, height, width), 0, 0, width, height)
    scale = min(height / rows, width / columns)
    inner_height, inner_width = (max(1, round(extent * scale)) for extent in (rows, columns))
    # Of an odd border, the larger half is at the bottom and on the right.
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    canvas = np.full((height, width, 3), _PADDING, np.uint8)
    canvas[top : top + inner_height, left : left + inner_width] = _resized(frame, inner_height, inner_width)
    return Placed(canvas, left, top, inner_width, inner_height)


def _resized(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    if frame.shape[:2] == (height, width):
        return frame
    return cv2.resize(frame, (width, height), interpolation=cv2.INTER_LINEAR)


class OnnxDetector:
    """Finds boxes with a model from a picture to one of `DESCRIPTIONS`.

    Raises ValueError for a file that onnxruntime cannot run, an input that is not a picture, or outputs of no known
    layout.

    Args:
        threads: number of threads; None for torch's.
    """

    def __init__(self, plan: OnnxDetectorTeacher, *, threads: int | None = None) -> None:
        self._file, self._plan = plan.file, plan
        self._shares = None if plan.boxes is None else plan.boxes == "shares"
        self._session = open_session(plan.file, threads)
        self._height, self._width, self._batched, self._type = self._input()
        self.labels = plan.labels or self._names()
        outputs = self._run(self._placed(_GREY))
        self.layout = recognise(
            outputs, len(self.labels), plan.layout, shares=self._shares, hint=self._layout_by_metadata()
        )
        if self.layout == "detr" and self.labels[-1].lower().replace("-", " ").replace("_", " ") == "no object":
            raise ValueError(f"`labels` ends with {self.labels[-1]!r}; remove it: the class for no object has no label")
        self.name = (
            f"ONNX detector {plan.file.stem} ({self.layout}, {len(self.labels)} labels, {self._width} x {self._height})"
        )

    def find(self, frame: np.ndarray) -> list[NamedBox]:
        placed = self._placed(frame)
        minimum = min(self._plan.min_confidence, _COUNTED)
        found = raw_boxes(self.layout, self._run(placed), minimum, len(self.labels), self._shares)
        unknown = found.classes[(found.classes < 0) | (found.classes >= len(self.labels))]
        if len(unknown):
            raise ValueError(
                f"a box has class {int(unknown[0])}, but `labels` has {len(self.labels)}: classes 0 to "
                f"{len(self.labels) - 1}; list all of the model's labels in order, its background class included"
            )
        scale = [self._width, self._height] * 2 if found.shares else [1.0] * 4
        edges = placed.shares(found.edges * scale)
        boxes = [
            Box(label, left, top, right, bottom, min(1.0, score))
            for label, (left, top, right, bottom), score in zip(
                found.classes.tolist(), edges.tolist(), found.scores.tolist(), strict=True
            )
        ]
        # Of rows after suppression, too: exporters leave several of one object.
        boxes = suppress(boxes, self._plan.overlap)
        clipped = [(box, [min(1.0, max(0.0, edge)) for edge in box[1:5]]) for box in boxes]
        return [
            NamedBox(self.labels[box.label], left, top, right, bottom, box.score)
            for box, (left, top, right, bottom) in clipped
            if left < right and top < bottom
        ]

    def _placed(self, frame: np.ndarray) -> Placed:
        return place(frame, self._height, self._width, self._plan.resize)

    def _run(self, placed: Placed) -> list[Output]:
        pixels = placed.pixels.astype(np.float32) / 255
        normal = (pixels - np.array(self._plan.mean, np.float32)) / np.array(self._plan.std, np.float32)
        planes: np.ndarray = np.ascontiguousarray(normal.transpose(2, 0, 1).astype(self._type))
        try:
            values = self._session.run(
                None, {self._session.get_inputs()[0].name: planes[None] if self._batched else planes}
            )
        except Exception as error:  # onnxruntime's errors share no class
            raise ValueError(f"{self._file} fails on a picture: {_first_line(error)}") from error
        names = [output.name for output in self._session.get_outputs()]
        if not all(isinstance(each, np.ndarray) for each in values):
            raise ValueError(f"{self._file} gives outputs that are not tensors; export it without maps or sequences")
        return [Output(name, each) for name, each in zip(names, values, strict=True)]

    def _input(self) -> tuple[int, int, bool, type]:
        """Height, width, whether there is a batch dimension, and the numbers' type."""
        inputs = self._session.get_inputs()
        shown = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs) or "none"
        shape = list(inputs[0].shape) if len(inputs) == 1 else []
        batched = len(shape) == 4
        if len(inputs) != 1 or inputs[0].type not in _TYPES or len(shape) not in (3, 4) or shape[-3] != 3:
            raise ValueError(
                f"{self._file} has the input {shown}; supported is one picture of float or float16 numbers, "
                "[1, 3, height, width] or [3, height, width]"
            )
        if batched and isinstance(shape[0], int) and shape[0] != 1:
            raise ValueError(f"{self._file} takes {shape[0]} pictures at a time ({shown}); export it for batches of 1")
        fixed = [extent if isinstance(extent, int) else self._plan.size for extent in shape[-2:]]
        if None in fixed:
            raise ValueError(f"{self._file} has an input without a fixed size ({shown}); set `size` in pixels")
        if self._plan.size is not None and fixed != [self._plan.size] * 2:
            raise ValueError(
                f"{self._file} takes pictures of {fixed[0]} x {fixed[1]}, not {self._plan.size}; remove `size`"
            )
        return int(fixed[0] or 0), int(fixed[1] or 0), batched, _TYPES[inputs[0].type]

    def _layout_by_metadata(self) -> LayoutName | None:
        """What Ultralytics stores in an exported file: its arguments, and the name of the model."""
        stored = self._session.get_modelmeta().custom_metadata_map
        if "'nms': True" in stored.get("args", "") or stored.get("end2end") == "True":
            return "end_to_end"
        named = stored.get("description", "").lower().replace("-", "")
        return "detr" if "rtdetr" in named else None

    def _names(self) -> tuple[str, ...]:
        """The labels that Ultralytics stores in an exported file: "{0: 'person', 1: 'car'}"."""
        text = self._session.get_modelmeta().custom_metadata_map.get("names", "")
        try:
            names = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            names = None
        if not isinstance(names, dict) or not names or sorted(names) != list(range(len(names))):
            raise ValueError(f"{self._file} contains no names of labels; set `labels`")
        return tuple(str(names[number]) for number in range(len(names)))


def open_session(file: Path, threads: int | None = None) -> Any:
    """An onnxruntime session on the CPU. Raises ValueError if the file is not a model that onnxruntime runs.

    Args:
        threads: number of threads; None for torch's.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"{file} needs onnxruntime; install it with pip install 'vlora[teachers]'") from error
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no class
        raise ValueError(f"{file} is not an ONNX model that onnxruntime can run: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Without the codes and the path with which onnxruntime begins."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition(" failed:")[2].removeprefix("[ONNXRuntimeError] : ").strip()


# -- layouts of outputs ------------------------------------------------------------------------------------------------

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
    """edges: left, top, right, bottom in pixels of the input, or as shares of it [n, 4]. scores: [n]. classes: int64
    [n]. shares: whether edges are shares."""

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
    found = _read(layout, outputs, num_labels)
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


def _read(layout: LayoutName, outputs: Sequence[Output], num_labels: int) -> RawBoxes:
    if layout == "separate":
        return _separate(outputs)
    if layout == "detr":
        return _detr(outputs, num_labels)
    rows = outputs[0].values[0].astype(np.float64)
    if layout == "end_to_end":  # a file with a fixed number of boxes pads with scores of zero
        return RawBoxes(rows[:, :4], rows[:, 4], rows[:, 5])
    if layout == "objectness":
        return _best_label(rows[:, :4], rows[:, 5:] * rows[:, 4:5])
    return _best_label(rows[:4].T, rows[4:].T)


def _separate(outputs: Sequence[Output]) -> RawBoxes:
    shapes = [output.values.shape for output in outputs]
    edges = next(output.values for output in outputs if _is_boxes(output.values.shape, shapes))
    flat = {output.name: output.values.ravel() for output in outputs if output.values.shape == edges.shape[:-1]}
    # The classes are the integer output, else one named label or class, else the last one.
    whole = [name for name, values in flat.items() if values.dtype.kind in "iu"]
    named = [name for name in flat if "label" in name.lower() or "class" in name.lower()]
    classes = flat.pop((whole or named or list(flat))[-1])
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
    return _best_label(boxes, scores[:, :num_labels])


def _best_label(centres: np.ndarray, scores: np.ndarray) -> RawBoxes:
    """centres: x, y, width and height of each box [n, 4]. scores: of each label [n, labels]."""
    half, classes = centres[:, 2:] / 2, scores.argmax(1)
    edges = np.concatenate([centres[:, :2] - half, centres[:, :2] + half], 1)
    return RawBoxes(edges, scores[np.arange(len(scores)), classes], classes)
