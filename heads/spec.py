"""Task heads: rows over hidden states, and the task that decodes their logits to an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from heads.task import Answer, Grid, Task
from heads.tasks import make_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head's description: the task it was trained for, and its input.

    prompt: the question to the model, exactly as in training. num_frames: images per request. parameters: the task's
    parameters besides labels and rows, by name (see each task); omitted ones get their default.

    Raises:
        ValueError: if a field is invalid.
    """

    name: str
    task: str
    labels: tuple[str, ...]
    prompt: str
    num_frames: int
    hidden_size: int
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field, kind in (("name", str), ("task", str), ("prompt", str), ("num_frames", int), ("hidden_size", int)):
            value = getattr(self, field)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"head {self.name!r}: {field} is {value!r}; expected {kind.__name__}")
        if not all(isinstance(label, str) and label for label in self.labels):
            raise ValueError(f"head {self.name!r}: labels are {self.labels!r}; every label must be a non-empty string")
        if not self.name:
            raise ValueError("name is empty; requests select a head by its name")
        if not self.prompt.strip():
            raise ValueError(f"head {self.name!r}: prompt is empty; give the question used in training")
        if self.num_frames < 1:
            raise ValueError(f"head {self.name!r}: num_frames is {self.num_frames}; it must be at least 1")
        if self.hidden_size < 1:
            raise ValueError(f"head {self.name!r}: hidden_size is {self.hidden_size}; it must be at least 1")
        if not isinstance(self.parameters, Mapping):
            raise ValueError(f"head {self.name!r}: parameters are {self.parameters!r}; expected a mapping")
        object.__setattr__(self, "parameters", dict(self.make_task().parameters))

    def make_task(self) -> Task:
        """The task of this head. Raises ValueError for an invalid description."""
        try:
            return make_task(self.task, self.labels, self.parameters)
        except ValueError as error:
            raise ValueError(f"head {self.name!r}: {error}") from error


class TaskHead:
    """A head's spec and its weight [rows, hidden] and bias [rows].

    Raises:
        ValueError: if shapes do not match the spec or values are not finite.
    """

    def __init__(self, spec: HeadSpec, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.task = spec.make_task()
        count = self.task.num_outputs
        if tuple(weight.shape) != (count, spec.hidden_size) or tuple(bias.shape) != (count,):
            raise ValueError(
                f"head {spec.name!r}: weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit "
                f"{count} rows ({spec.task}, {len(spec.labels)} labels) over {spec.hidden_size} features"
            )
        if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
            raise ValueError(f"head {spec.name!r}: weight or bias has values that are not finite (NaN or infinity)")
        self.spec = spec
        self.weight = weight
        self.bias = bias

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> TaskHead:
        """The same head on another device or in another dtype."""
        return TaskHead(self.spec, self.weight.to(device, dtype), self.bias.to(device, dtype))

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """Decode this head's logits to an answer; `Task` documents their shape."""
        return self.task.decode(logits, grids)
