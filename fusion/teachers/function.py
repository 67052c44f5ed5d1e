"""A user function as a teacher."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from fusion.data.items import Answer, NamedBox
from fusion.teachers.protocol import Clip, Labelled


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
            return tuple(answer)
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
    edges = [float(edge) for edge in box[1:5]]
    if (
        not all(math.isfinite(edge) and 0 <= edge <= 1 for edge in edges)
        or edges[0] >= edges[2]
        or edges[1] >= edges[3]
    ):
        raise ValueError(
            f"its box {each!r} is invalid; expected (label, left, top, right, bottom) with edges from 0 to 1"
        )
    return box
