"""The `teacher` of a plan's domain: the kinds of teachers and their files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vlora.plan_files.fields import Number, PlanModel, PlanPath, Whole

_FUNCTION = r"^[\w.]+:\w+$"


def _positive(std: tuple[float, float, float]) -> tuple[float, float, float]:
    if min(std) <= 0:
        raise ValueError(f"{list(std)} must be above 0")
    return std


Colors = tuple[float, float, float]
PositiveColors = Annotated[Colors, AfterValidator(_positive)]


class _Teacher(PlanModel):
    """min_confidence: answers (for a detector: boxes) below this confidence are dropped. allow_code: allow loading of
    user code, and of files that can run code when they are loaded."""

    min_confidence: Number = Field(0.0, ge=0, le=1)
    allow_code: bool = False


class BuiltInTeacher(_Teacher):
    """The package's small model for a built-in source; it is trained on the domain's training part."""

    kind: Literal["built_in"]


class DetectorPlan(_Teacher):
    """absent: the label of a picture without detections, for the task classification. only: the labels of boxes that
    count; if empty, all of them. Counting and binary need it where the detector has several labels."""

    absent: str = "nothing"
    only: tuple[str, ...] = Field((), min_length=1)


class CascadeTeacher(DetectorPlan):
    """An OpenCV cascade, which detects one kind of object. file: XML; None for OpenCV's frontal faces. label: name of
    the detected objects."""

    kind: Literal["cascade"]
    file: PlanPath | None = None
    label: str = "face"


class HogTeacher(DetectorPlan):
    """OpenCV's detector of people. label: name of the detected people."""

    kind: Literal["hog"]
    label: str = "person"


class SklearnTeacher(_Teacher):
    """A fitted scikit-learn classifier over grey pixels of `size` x `size`, 0 to 1, row by row. file: skops; or joblib
    or pickle, which run code. labels: label of each class, in order; None for the classes' own names."""

    kind: Literal["sklearn"]
    file: PlanPath
    size: Whole = Field(ge=1, le=1024)
    labels: tuple[str, ...] | None = None


class _Network(_Teacher):
    """labels: label of each output. size: height and width in pixels of its input [1, 3, size, size]. mean, std: the
    normalisation of colours from 0 to 1."""

    file: PlanPath
    labels: tuple[str, ...] = Field(min_length=2)
    size: Whole = Field(ge=8, le=2048)
    mean: Colors = (0.0, 0.0, 0.0)
    std: PositiveColors = (1.0, 1.0, 1.0)


class TorchTeacher(_Network):
    """A torch module that returns logits [1, labels]. file: its weights (safetensors), with `module`, the PACKAGE:NAME
    of the function that builds it; or a TorchScript file; or a torch.export file (.pt2). All of them run code."""

    kind: Literal["torch"]
    module: str | None = Field(None, pattern=_FUNCTION)


class OnnxTeacher(_Network):
    """An ONNX classifier run by OpenCV; it returns logits or probabilities [1, labels]."""

    kind: Literal["onnx"]


class OnnxDetectorTeacher(DetectorPlan):
    """An ONNX detector run by onnxruntime.

    labels: of each class, in order, a background class included; None for the names that Ultralytics stores in the
    file. size: height and width in pixels, if the file leaves them open. mean, std: normalisation of
    colours from 0 to 1. resize: "letterbox" keeps the aspect ratio, with grey borders. layout: of the outputs
    (`fusion.teachers.onnx_detector`); None to recognise it. boxes: whether edges are pixels of the input or shares
    of it; None to recognise it. overlap: suppression drops the less confident of two boxes of one label with more IoU
    than this.
    """

    kind: Literal["onnx_detector"]
    file: PlanPath
    labels: tuple[str, ...] | None = Field(None, min_length=1)
    size: Whole | None = Field(None, ge=8, le=4096)
    mean: Colors = (0.0, 0.0, 0.0)
    std: PositiveColors = (1.0, 1.0, 1.0)
    resize: Literal["letterbox", "stretch"] = "letterbox"
    layout: Literal["anchor_free", "objectness", "end_to_end", "separate", "detr"] | None = None
    boxes: Literal["pixels", "shares"] | None = None
    overlap: Number = Field(0.45, gt=0, lt=1)
    min_confidence: Number = Field(0.25, gt=0, le=1)


class TransformersTeacher(DetectorPlan):
    """A classifier of pictures or videos, or a detector, from a local folder in transformers' format. Weights that are
    not safetensors run code. rename: maps its labels to the domain's."""

    kind: Literal["transformers"]
    path: PlanPath
    rename: dict[str, str] = Field(default_factory=dict)


class CallableTeacher(_Teacher):
    """A user function MODULE:FUNCTION from a list of RGB pictures to (answer, confidence)."""

    kind: Literal["callable"]
    function: str = Field(pattern=_FUNCTION)


TeacherPlan = Annotated[
    BuiltInTeacher
    | CascadeTeacher
    | HogTeacher
    | SklearnTeacher
    | TorchTeacher
    | OnnxTeacher
    | OnnxDetectorTeacher
    | TransformersTeacher
    | CallableTeacher,
    Field(discriminator="kind"),
]
