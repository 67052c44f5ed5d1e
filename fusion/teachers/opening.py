"""Loading of a plan's teacher. Files that can run code are refused unless the plan allows it."""

from __future__ import annotations

import os

from fusion.plan.teacher_kinds import (
    BuiltInTeacher,
    CallableTeacher,
    CascadeTeacher,
    HogTeacher,
    OnnxDetectorTeacher,
    OnnxTeacher,
    SklearnTeacher,
    TeacherPlan,
    TorchTeacher,
    TransformersTeacher,
)
from fusion.teachers import boxes
from fusion.teachers.boxes import Detector
from fusion.teachers.classifier import Preprocessing
from fusion.teachers.estimator import Estimator, load_estimator
from fusion.teachers.function import UserFunction
from fusion.teachers.module import ModuleClassifier, load_module
from fusion.teachers.onnx_detector import DetectorSettings, OnnxDetector
from fusion.teachers.opencv import Cascade, OnnxClassifier, People
from fusion.teachers.pretrained import PretrainedDetector, load_pretrained
from fusion.teachers.protocol import Teacher
from vlora.plan_files.errors import PlanErrors

_NAMES = ("file", "path", "function")  # fields that identify a teacher
_COUNTED = 0.05  # least score of a box that counts as dropped below the plan's minimum confidence
_ALLOW = "set `allow_code: true` if you trust it"


def open_teacher(plan: TeacherPlan, task: str, errors: PlanErrors) -> Teacher | None:
    """Load a teacher for a task. Returns None, after reporting an error with its field, if that fails."""
    refused = runs_code(plan)
    if refused is not None and not plan.allow_code:
        field, why = refused
        errors.add(f"{why}; {_ALLOW}", field)
        return None
    file = getattr(plan, "file", None) or getattr(plan, "path", None)
    if file is not None and not os.path.exists(file):  # also false for a name that is too long
        errors.add(f"there is no {file}", "file" if hasattr(plan, "file") else "path")
        return None
    try:
        return _open(plan, task)
    except ValueError as error:
        errors.add(str(error), next((field for field in _NAMES if hasattr(plan, field)), "kind"))
        return None


def _open(plan: TeacherPlan, task: str) -> Teacher:
    match plan:
        case CascadeTeacher():
            return _find(plan, Cascade(plan.file, plan.label), task)
        case HogTeacher():
            return _find(plan, People(plan.label), task)
        case SklearnTeacher(file=file):
            return Estimator(load_estimator(file, plan.allow_code), file.name, plan.size, plan.labels)
        case TorchTeacher(file=file):
            return ModuleClassifier(load_module(file, plan.module), file.name, plan.labels, _sizes(plan))
        case OnnxTeacher():
            return OnnxClassifier(plan.file, plan.labels, _sizes(plan))
        case OnnxDetectorTeacher():
            return _find(plan, OnnxDetector(plan.file, _detector_settings(plan)), task)
        case TransformersTeacher():
            return _pretrained(plan, task)
        case CallableTeacher():
            return UserFunction(plan.function)
        case BuiltInTeacher():
            raise ValueError("a built-in teacher works only with a built-in source; choose another kind")


def runs_code(plan: TeacherPlan) -> tuple[str, str] | None:
    """The field that can run code when the teacher is loaded, and the reason; None if loading is safe."""
    match plan:
        case SklearnTeacher(file=file) if file.suffix != ".skops":
            return "file", f"{file.name} is a pickle, which can run any code when it is loaded (skops files cannot)"
        case TorchTeacher(file=file):
            return "file", f"{file.name} is loaded together with code"
        case CallableTeacher():
            return "function", f"{plan.function} is code"
    return None


def _find(
    plan: CascadeTeacher | HogTeacher | OnnxDetectorTeacher | TransformersTeacher, detector: Detector, task: str
) -> Teacher:
    if task not in boxes.TASKS:
        raise ValueError(f"{detector.name} is a detector, which supports {', '.join(boxes.TASKS)}, not {task}")
    return boxes.FromBoxes(detector, task, plan.min_confidence, plan.absent, plan.only)


def _pretrained(plan: TransformersTeacher, task: str) -> Teacher:
    found = load_pretrained(plan.path, plan.rename, plan.allow_code)
    if isinstance(found, PretrainedDetector):
        return _find(plan, found, task)
    if plan.only:
        raise ValueError(f"{found.name} is a classifier, and `only` chooses boxes of a detector; remove it")
    return found


def _sizes(plan: OnnxTeacher | TorchTeacher) -> Preprocessing:
    return Preprocessing(plan.size, plan.mean, plan.std)


def _detector_settings(plan: OnnxDetectorTeacher) -> DetectorSettings:
    return DetectorSettings(
        labels=plan.labels,
        size=plan.size,
        mean=plan.mean,
        std=plan.std,
        resize=plan.resize,
        layout=plan.layout,
        shares=None if plan.boxes is None else plan.boxes == "shares",
        minimum=min(plan.min_confidence, _COUNTED),
        overlap=plan.overlap,
    )
