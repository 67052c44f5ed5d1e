"""Loading of a plan's teacher. Files that can run code are refused unless the plan allows it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForObjectDetection,
    AutoModelForVideoClassification,
)

from fusion.data.samples import Answer, NamedBox, answer_of
from fusion.plan import teacher_kinds as kinds
from fusion.teachers import Classifier, Clip, Labelled, Teacher, few, network_input
from fusion.teachers.onnx_detector import OnnxDetector
from fusion.teachers.opencv import Cascade, People, onnx_classifier
from vlora.plan_files.errors import PlanErrors

_KINDS = {
    "ForImageClassification": AutoModelForImageClassification,
    "ForObjectDetection": AutoModelForObjectDetection,
    "ForVideoClassification": AutoModelForVideoClassification,
}


def open_pretrained(plan: kinds.TransformersTeacher, task: str) -> Teacher:
    """Load the architecture in the folder's config.

    Code in the folder is never run; weights that are not safetensors need allow_code. Raises ValueError if loading
    fails.
    """
    folder, safely = plan.path, {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **safely)
        name = (config.architectures or ["none"])[0]
        kind = next((kind for kind in _KINDS if name.endswith(kind)), None)
        if kind is None:
            raise ValueError(f"its architecture is {name}; supported names end with {', '.join(_KINDS)}")
        weights = None if plan.allow_code else True  # None accepts any format
        model = _KINDS[kind].from_pretrained(folder, use_safetensors=weights, **safely).eval()
        processor = AutoImageProcessor.from_pretrained(folder, **safely)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    own = [config.id2label[number] for number in range(config.num_labels)]
    if unknown := sorted(set(plan.rename) - set(own)):
        raise ValueError(f"renames {', '.join(unknown)}, which {folder} does not have")
    labels = tuple(plan.rename.get(label, label) for label in own)
    title = f"{name} {folder.name}"
    if kind == "ForObjectDetection":
        return _find(plan, PretrainedDetector(title, model, processor, labels), task)
    if plan.only:
        raise ValueError(f"{title} is a classifier, and `only` chooses boxes of a detector; remove it")
    # A model of videos reads a clip as a whole, resampled evenly to its number of frames; others read frame by frame.
    wanted = getattr(model.config, "num_frames", None) if kind == "ForVideoClassification" else None

    @torch.no_grad()
    def rows(clip: Clip) -> np.ndarray:
        frames = list(clip)
        if wanted is not None and len(frames) != wanted:
            frames = [frames[round(place)] for place in np.linspace(0, len(frames) - 1, wanted)]
        logits: np.ndarray = model(**processor(frames, return_tensors="pt")).logits.numpy()
        return logits

    return Classifier(title, labels, rows)


class PretrainedDetector:
    def __init__(self, name: str, model: Any, processor: Any, labels: tuple[str, ...]) -> None:
        self.name, self.labels = name, labels
        self._model, self._processor = model, processor

    @torch.no_grad()
    def find(self, frame: np.ndarray) -> list[NamedBox]:
        outputs = self._model(**self._processor(frame, return_tensors="pt"))
        sizes = torch.ones(1, 2)  # edges as shares of the picture
        (found,) = self._processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
        edges, scores, labels = found["boxes"].clamp(0, 1).tolist(), found["scores"].tolist(), found["labels"].tolist()
        boxes = [
            NamedBox(self.labels[label], left, top, right, bottom, score)
            for (left, top, right, bottom), score, label in zip(edges, scores, labels, strict=True)
        ]
        return [box for box in boxes if box.left < box.right and box.top < box.bottom]


_BOX_TASKS = ("detection", "counting", "binary", "multi_label", "classification")
_UNNAMED = ("counting", "binary")  # answers that do not show the labels of boxes


class Detector(Protocol):
    name: str
    labels: tuple[str, ...]

    def find(self, frame: np.ndarray) -> list[NamedBox]:
        """All boxes in an RGB picture, whatever their confidence."""


class FromBoxes:
    """Answers of one of _BOX_TASKS from a detector's boxes in a picture, or in a clip's first frame.

    Args:
        floor: boxes below this confidence are dropped.
        absent: the class of a picture without boxes.
        only: boxes of other labels are ignored; if empty, none are.

    Raises:
        ValueError: the detector lacks one of `only`, or an answer without labels would count boxes of several.
    """

    def __init__(self, detector: Detector, task: str, floor: float, absent: str, only: tuple[str, ...] = ()) -> None:
        assert task in _BOX_TASKS, task
        if unknown := sorted(set(only) - set(detector.labels)):
            raise ValueError(
                f"`only` names {', '.join(unknown)}, which {detector.name} lacks; it has {few(detector.labels)}"
            )
        if task in _UNNAMED and not only and len(set(detector.labels)) > 1:
            raise ValueError(
                f"{task} would count boxes of all labels of {detector.name} ({few(detector.labels)}); name those that "
                f"count, for example `only: [{detector.labels[0]}]`"
            )
        self.name = detector.name
        names = only or detector.labels
        of_task = {"classification": (*names, absent), "binary": ("no", "yes"), "counting": ()}
        self.labels: tuple[str, ...] = of_task.get(task, names)
        self._detector, self._task, self._floor, self._absent = detector, task, floor, absent
        self._names = frozenset(names)

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [self._one(clip[0]) for clip in clips]

    def _one(self, frame: np.ndarray) -> Labelled:
        found = [box for box in self._detector.find(frame) if box.label in self._names]
        boxes = sorted((box for box in found if box.confidence >= self._floor), key=lambda box: -box.confidence)
        # A picture has the confidence of its most confident box; without boxes there is no score, so 1.
        sure = boxes[0].confidence if boxes else 1.0
        return Labelled(answer_of(boxes, self._task, self._absent), sure, len(found) - len(boxes))


_NAMES = ("file", "path", "function")  # fields that identify a teacher


def open_teacher(plan: kinds.TeacherPlan, task: str, errors: PlanErrors) -> Teacher | None:
    """Load a teacher for a task. Returns None, after reporting an error with its field, if that fails."""
    if not plan.allow_code and (refused := _runs_code(plan)) is not None:
        field, why = refused
        errors.add(f"{why}; set `allow_code: true` if you trust it", field)
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


def _open(plan: kinds.TeacherPlan, task: str) -> Teacher:
    match plan:
        case kinds.CascadeTeacher():
            return _find(plan, Cascade(plan.file, plan.label), task)
        case kinds.HogTeacher():
            return _find(plan, People(plan.label), task)
        case kinds.SklearnTeacher():
            return _estimator(plan)
        case kinds.TorchTeacher():
            return _module_classifier(plan)
        case kinds.OnnxTeacher():
            return onnx_classifier(plan)
        case kinds.OnnxDetectorTeacher():
            return _find(plan, OnnxDetector(plan), task)
        case kinds.TransformersTeacher():
            return open_pretrained(plan, task)
        case kinds.CallableTeacher():
            return UserFunction(plan.function)
        case kinds.BuiltInTeacher():
            raise ValueError("a built-in teacher works only with a built-in source; choose another kind")


def _runs_code(plan: kinds.TeacherPlan) -> tuple[str, str] | None:
    """The field that can run code when the teacher is loaded, and the reason; None if loading is safe."""
    match plan:
        case kinds.SklearnTeacher(file=file) if file.suffix != ".skops":
            return "file", f"{file.name} is a pickle, which can run any code when it is loaded (skops files cannot)"
        case kinds.TorchTeacher(file=file):
            return "file", f"{file.name} is loaded together with code"
        case kinds.CallableTeacher():
            return "function", f"{plan.function} is code"
    return None


def _find(plan: kinds.DetectorPlan, detector: Detector, task: str) -> Teacher:
    if task not in _BOX_TASKS:
        raise ValueError(f"{detector.name} is a detector, which supports {', '.join(_BOX_TASKS)}, not {task}")
    return FromBoxes(detector, task, plan.min_confidence, plan.absent, plan.only)


def _module_classifier(plan: kinds.TorchTeacher) -> Classifier:
    """A module from [1, 3, size, size] to logits [1, labels], of which loading runs code in all three formats. Raises
    ValueError if it cannot be loaded, or its outputs have another shape."""
    file = plan.file
    try:
        module: Any
        if file.suffix == ".safetensors":
            if plan.module is None:
                raise ValueError("weights alone are not a model; set `module` to the PACKAGE:NAME that builds it")
            module = import_function(plan.module)()
            module.load_state_dict(load_file(file))
            module.eval()
        elif file.suffix == ".pt2":
            module = torch.export.load(file).module()
        else:
            module = torch.jit.load(str(file), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except Exception as error:  # foreign code may raise any exception
        raise ValueError(f"{file} cannot be loaded: {error}") from error

    @torch.no_grad()
    def rows(clip: Clip) -> np.ndarray:
        # One at a time: an exported module may accept only batches of 1.
        inputs = [torch.from_numpy(network_input(plan, frame))[None] for frame in clip]
        return torch.cat([module(one) for one in inputs]).float().numpy()

    try:
        outputs = rows([np.zeros((8, 8, 3), np.uint8)])
    except Exception as error:  # a module may raise any exception
        raise ValueError(f"it fails on a black picture: {type(error).__name__}: {error}") from error
    if outputs.shape != (1, len(plan.labels)):
        raise ValueError(f"it gives outputs of the shape {outputs.shape} for {len(plan.labels)} labels")
    return Classifier(f"torch {file.name}", plan.labels, rows)


def _load_estimator(file: Path, allow_code: bool) -> Any:
    """Load a skops file, or any file that joblib reads, which runs code.

    Without allow_code, a skops file may contain only types that skops trusts. Raises ValueError if loading fails.
    """
    try:
        if file.suffix == ".skops":
            import skops.io

            unknown = skops.io.get_untrusted_types(file=file)
            if unknown and not allow_code:
                raise ValueError(f"{', '.join(unknown)} may be unsafe; set `allow_code: true` if you trust it")
            return skops.io.load(file, trusted=unknown)
        import joblib

        return joblib.load(file)
    except ImportError as error:
        raise ValueError(f"{file} needs {error.name}; install it with pip install 'vlora[teachers]'") from error
    except Exception as error:  # both raise arbitrary exceptions, depending on the content
        raise ValueError(f"{file} cannot be loaded: {error}") from error


def _estimator(plan: kinds.SklearnTeacher) -> Classifier:
    """Labels grey pixels of size x size, 0 to 1, row by row, with the model's `classes_`, or with `labels` instead.

    The confidence comes from `predict_proba`; it is 1 without that method. Raises ValueError if the model does not fit.
    """
    model, size = _load_estimator(plan.file, plan.allow_code), plan.size
    if not hasattr(model, "predict") or not hasattr(model, "classes_"):
        raise ValueError(f"{type(model).__name__} is not a fitted classifier")
    wanted = getattr(model, "n_features_in_", size * size)
    if wanted != size * size:
        raise ValueError(f"it takes {wanted} features, but size {size} makes {size * size} grey pixels")
    classes = list(model.classes_)
    labels = plan.labels or tuple(map(str, classes))
    if len(labels) != len(classes):
        raise ValueError(f"it has {len(classes)} classes ({classes}), but `labels` has {len(labels)}")

    def rows(clip: Clip) -> np.ndarray:
        grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in clip]
        small = [cv2.resize(frame, (size, size), interpolation=cv2.INTER_AREA).ravel() / 255 for frame in grey]
        if hasattr(model, "predict_proba"):
            return np.asarray(model.predict_proba(np.stack(small)))
        return np.eye(len(classes))[[classes.index(label) for label in model.predict(np.stack(small))]]

    return Classifier(f"scikit-learn {plan.file.name}", labels, rows)


def import_function(path: str) -> Callable[..., Any]:
    """Import PACKAGE.MODULE:NAME, which runs code. Raises ValueError with the reason if that fails."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # a module may raise any exception
        raise ValueError(f"importing {module} failed: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{module} has no function {name}")
    return found


class UserFunction:
    """A function from a list of RGB frames to (answer, confidence).

    An answer is a label, a number, words, a list of labels, or a list of boxes (label, left, top, right, bottom[,
    confidence]) with edges as shares of the picture.
    """

    labels: tuple[str, ...] = ()

    def __init__(self, path: str) -> None:
        self.name = path
        self._function = import_function(path)

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [self._one(list(clip)) for clip in clips]

    def _one(self, frames: list[Any]) -> Labelled:
        try:
            result = self._function(frames)
        except SystemExit as error:  # would end this process silently
            raise ValueError(f"it ended the process, with {error.code!r}") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Real)):
            raise ValueError(f"it returned {result!r}; expected (answer, confidence)")
        answer, confidence = result
        if not 0 <= confidence <= 1:
            raise ValueError(f"its confidence is {confidence}; expected 0 to 1")
        return Labelled(_answer(answer), float(confidence))


def _answer(answer: Any) -> Answer:
    if isinstance(answer, list | tuple):
        if all(isinstance(each, str) for each in answer):
            return tuple(map(str, answer))  # also of a subclass, as numpy has
        return tuple(_box(each) for each in answer)
    if isinstance(answer, bool | np.bool_):
        return "yes" if answer else "no"
    if isinstance(answer, str | Real):
        return str(answer)
    raise ValueError(f"its answer is {answer!r}; expected words, a number, or a list of labels or boxes")


def _box(each: Any) -> NamedBox:
    box = NamedBox(*each)
    if not (isinstance(box.label, str) and box.label):
        raise ValueError(f"its box {each!r} has the label {box.label!r}; expected a name")
    if not (isinstance(box.confidence, Real) and 0 <= box.confidence <= 1):
        raise ValueError(f"its box {each!r} has the confidence {box.confidence!r}; expected 0 to 1")
    left, top, right, bottom = (float(edge) for edge in box[1:5])
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):  # nor for NaN
        raise ValueError(
            f"its box {each!r} is invalid; expected (label, left, top, right, bottom) with edges from 0 to 1"
        )
    return box._replace(label=str(box.label))
