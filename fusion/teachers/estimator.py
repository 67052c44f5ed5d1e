"""A scikit-learn classifier as a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from fusion.teachers.classifier import classify
from fusion.teachers.protocol import Clip, Labelled


def load_estimator(file: Path, allow_code: bool) -> Any:
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


class Estimator:
    """Labels grey pixels of size x size, 0 to 1, row by row, with the model's `classes_`, or with `labels` instead.

    The confidence comes from `predict_proba`; it is 1 without that method. Raises ValueError if the model does not fit.
    """

    def __init__(self, model: Any, name: str, size: int, labels: tuple[str, ...] | None) -> None:
        self.name = f"scikit-learn {name}"
        self._model, self._size = model, size
        if not hasattr(model, "predict") or not hasattr(model, "classes_"):
            raise ValueError(f"{type(model).__name__} is not a fitted classifier")
        wanted = getattr(model, "n_features_in_", size * size)
        if wanted != size * size:
            raise ValueError(f"it takes {wanted} features, but size {size} makes {size * size} grey pixels")
        self._classes = list(model.classes_)
        self.labels = labels or tuple(map(str, self._classes))
        if len(self.labels) != len(self._classes):
            raise ValueError(
                f"it has {len(self._classes)} classes ({self._classes}), but `labels` has {len(self.labels)}"
            )

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [classify(self._probabilities(clip), self.labels) for clip in clips]

    def _probabilities(self, clip: Clip) -> np.ndarray:
        features = np.stack([self._features(frame) for frame in clip])
        if hasattr(self._model, "predict_proba"):
            return np.asarray(self._model.predict_proba(features))
        chosen = [self._classes.index(label) for label in self._model.predict(features)]
        return np.eye(len(self._classes))[chosen]

    def _features(self, frame: np.ndarray) -> np.ndarray:
        grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (self._size, self._size), interpolation=cv2.INTER_AREA).ravel() / 255
