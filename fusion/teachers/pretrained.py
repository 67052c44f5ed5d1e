"""Classifiers of pictures and videos, and detectors, in transformers' format, from a local folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForObjectDetection,
    AutoModelForVideoClassification,
)

from fusion.data.items import NamedBox
from fusion.teachers.protocol import Classifier, Clip

_KINDS = {
    "ForImageClassification": AutoModelForImageClassification,
    "ForObjectDetection": AutoModelForObjectDetection,
    "ForVideoClassification": AutoModelForVideoClassification,
}


def load_pretrained(folder: Path, rename: Mapping[str, str], allow_code: bool) -> Classifier | PretrainedDetector:
    """Load the architecture in the folder's config.

    Code in the folder is never run; weights that are not safetensors need allow_code. Raises ValueError if loading
    fails.
    """
    safely = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **safely)
        name = (config.architectures or ["none"])[0]
        kind = next((kind for kind in _KINDS if name.endswith(kind)), None)
        if kind is None:
            raise ValueError(f"its architecture is {name}; supported names end with {', '.join(_KINDS)}")
        weights = None if allow_code else True  # None accepts any format
        model = _KINDS[kind].from_pretrained(folder, use_safetensors=weights, **safely).eval()
        processor = AutoImageProcessor.from_pretrained(folder, **safely)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    unknown = sorted(set(rename) - set(config.id2label.values()))
    if unknown:
        raise ValueError(f"renames {', '.join(unknown)}, which {folder} does not have")
    own = [config.id2label[number] for number in range(config.num_labels)]
    labels = tuple(rename.get(label, label) for label in own)
    title = f"{name} {folder.name}"
    if kind == "ForObjectDetection":
        return PretrainedDetector(title, model, processor, labels)
    return _classifier(title, model, processor, labels, videos=kind == "ForVideoClassification")


def _classifier(name: str, model: Any, processor: Any, labels: tuple[str, ...], *, videos: bool) -> Classifier:
    """Labels a clip by the mean probability over its frames. videos: the model reads a clip as a whole, which is
    resampled evenly to the model's number of frames."""
    wanted = getattr(model.config, "num_frames", None) if videos else None

    @torch.no_grad()
    def rows(clip: Clip) -> np.ndarray:
        frames = list(clip)
        if wanted is not None and len(frames) != wanted:
            frames = [frames[round(place)] for place in np.linspace(0, len(frames) - 1, wanted)]
        logits: np.ndarray = model(**processor(frames, return_tensors="pt")).logits.numpy()
        return logits

    return Classifier(name, labels, rows)


class PretrainedDetector:
    """Boxes from the model's own post-processing."""

    def __init__(self, name: str, model: Any, processor: Any, labels: tuple[str, ...]) -> None:
        self.name = name
        self._model, self._processor, self.labels = model, processor, labels

    @torch.no_grad()
    def find(self, frame: np.ndarray) -> list[NamedBox]:
        height, width = frame.shape[:2]
        outputs = self._model(**self._processor(frame, return_tensors="pt"))
        sizes = torch.tensor([[height, width]])
        (found,) = self._processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
        boxes = []
        for score, label, (left, top, right, bottom) in zip(
            found["scores"].tolist(), found["labels"].tolist(), found["boxes"].tolist(), strict=True
        ):
            x = [min(1.0, max(0.0, edge / width)) for edge in (left, right)]
            y = [min(1.0, max(0.0, edge / height)) for edge in (top, bottom)]
            if x[0] < x[1] and y[0] < y[1]:
                boxes.append(NamedBox(self.labels[label], x[0], y[0], x[1], y[1], score))
        return boxes
