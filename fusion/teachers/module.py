"""A torch module as a teacher: its own code with weights in safetensors, TorchScript, or torch.export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fusion.teachers.classifier import Preprocessing, classify
from fusion.teachers.function import import_function
from fusion.teachers.protocol import Clip, Labelled


def load_module(file: Path, builder: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Load a module, which runs code in all three formats. Raises ValueError if that fails."""
    try:
        if file.suffix == ".safetensors":
            if builder is None:
                raise ValueError("weights alone are not a model; set `module` to the PACKAGE:NAME that builds it")
            module = import_function(builder)()
            module.load_state_dict(load_file(file))
            return module.eval()  # type: ignore[no-any-return]
        if file.suffix == ".pt2":
            return torch.export.load(file).module()
        return torch.jit.load(str(file), map_location="cpu").eval()  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:  # foreign code may raise any exception
        raise ValueError(f"{file} cannot be loaded: {error}") from error


class ModuleClassifier:
    """A module from [1, 3, size, size] to logits [1, labels]. Raises ValueError if its outputs have another shape."""

    def __init__(self, module: Any, name: str, labels: tuple[str, ...], preprocessing: Preprocessing) -> None:
        self.name = f"torch {name}"
        self._module, self.labels, self._preprocessing = module, labels, preprocessing
        try:
            outputs = self._run([np.zeros((8, 8, 3), np.uint8)])
        except Exception as error:  # a module may raise any exception
            raise ValueError(f"it fails on a black picture: {type(error).__name__}: {error}") from error
        if outputs.shape != (1, len(labels)):
            raise ValueError(f"it gives outputs of the shape {outputs.shape} for {len(labels)} labels")

    def label(self, clips: Sequence[Clip]) -> list[Labelled]:
        return [classify(self._run(clip), self.labels) for clip in clips]

    @torch.no_grad()
    def _run(self, clip: Clip) -> np.ndarray:
        # One at a time: an exported module may accept only batches of 1.
        inputs = [torch.from_numpy(self._preprocessing(frame))[None] for frame in clip]
        return torch.cat([self._module(one) for one in inputs]).float().numpy()
