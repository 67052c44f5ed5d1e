"""A scikit-learn classifier as a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from fusion.teachers.classifier import classified
from fusion.teachers.protocol import Clip, Labelled


def load_estimator(file: Path, allow_code: bool) -> Any:
    """skops, or whatever joblib reads; the latter runs code. Of skops files only types that skops knows no harm of,
    without allow_code. Raises ValueError for what cannot be read."""
    try:
        if file.suffix == ".skops":
            import skops.io

            unknown = skops.io.get_untrusted_types(file=file)
            if unknown and not allow_code:
                raise ValueError(f"{', '.join(unknown)} may do harm; set `allow_code: true` if you trust it")
            return skops.io.load(file, trusted=unknown)
        import joblib

        return joblib.load(file)
    except ImportError as error:
        raise ValueError(f"{file} needs {error.name}; install it with pip install 'vlora[teachers]'") from error
    except Exception as error:  # both raise whatever their content makes them raise
        raise ValueError(f"{file} cannot be loaded: {error}") from error


class Estimator:
    """Grey pixels of size x size, 0 to 1, row by row, to the labels of `classes_`, or `labels` in their place. Sure by
    `predict_proba`; entirely where it has none. Raises ValueError where the model does not fit."""

    def __init__(self, model: Any, name: str, size: int, labels: tuple[str, ...] | None) -> None:
        self.name = f"scikit-learn {name}"
        self._model, self._size = model, size
        if not hasattr(model, "predict") or not hasattr(model, "classes_"):
            raise ValueError(f"{type(model).__name__} is no classifier that has been fitted")
        wanted = getattr(model, "n_features_in_", size * size)
        if wanted != size * size:
            raise ValueError(f"it takes {wanted} features, but size {size} makes {size * size} grey pixels")
        self._classes = list(model.classes_)
        self.labels = labels or tuple(map(str, self._classes))
        if len(self.labels) != len(self._classes):
            raise ValueError(
                f"it knows {len(self._classes)} classes ({self._classes}), but labels are {len(self.labels)}"
            )

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [classified(self._probabilities(clip), self.labels) for clip in clips]

    def _probabilities(self, clip: Clip) -> np.ndarray:
        features = np.stack([self._features(frame) for frame in clip])
        if hasattr(self._model, "predict_proba"):
            return np.asarray(self._model.predict_proba(features))
        chosen = [self._classes.index(label) for label in self._model.predict(features)]
        return np.eye(len(self._classes))[chosen]

    def _features(self, frame: np.ndarray) -> np.ndarray:
        grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (self._size, self._size), interpolation=cv2.INTER_AREA).ravel() / 255
