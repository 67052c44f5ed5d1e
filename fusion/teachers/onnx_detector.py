"""ONNX detectors as teachers, run by onnxruntime and decoded here. No code from the file is run."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np

from fusion.data.samples import NamedBox
from fusion.plan.teacher_kinds import OnnxDetectorTeacher
from fusion.teachers.detector_layouts import LayoutName, Output, raw_boxes, recognise
from heads.answer import Box, suppress

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_GREY = np.full((64, 64, 3), 114, np.uint8)

_COUNTED = 0.05  # least score of a box that counts as dropped below the plan's minimum confidence
_PADDING = 114  # grey level of the border that Ultralytics trains with

Resize = Literal["letterbox", "stretch"]

# Pictures to the inputs of detectors: letterboxed as YOLO models are trained, or stretched; and boxes back again.


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
    """Finds boxes with a model from a picture to one of the layouts of `detector_layouts`.

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
