"""Task heads: rows over hidden states, and the task that decodes their logits to an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from heads.answer import Answer, Grid
from heads.task import Task
from heads.tasks import make_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head's description: the task it was trained for, and its input.

    prompt: the question to the model, exactly as in training. num_frames: images per request. parameters: the task's
    parameters besides labels and rows, by name (see each task); omitted ones get their default. reads: `states`, the
    model's last hidden states, or `inputs`, the language model's inputs at image tokens, which only heads over image
    tokens can read. hidden_units: units of a layer before the rows, 0 for none; only heads that read inputs have one.

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
    reads: str = "states"
    hidden_units: int = 0

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
        task = self.make_task()
        object.__setattr__(self, "parameters", dict(task.parameters))
        self._check_layers(task)

    def _check_layers(self, task: Task) -> None:
        units = self.hidden_units
        if self.reads not in ("states", "inputs"):
            raise ValueError(f"head {self.name!r}: reads is {self.reads!r}; choose states or inputs")
        if self.reads == "inputs" and not task.reads_images:
            raise ValueError(f"head {self.name!r}: reads is 'inputs'; a {self.task} head reads states")
        if isinstance(units, bool) or not isinstance(units, int) or (units > 0) != (self.reads == "inputs"):
            wanted = "at least 1" if self.reads == "inputs" else "0"
            raise ValueError(
                f"head {self.name!r}: hidden_units is {units!r}; a head that reads {self.reads} has {wanted}"
            )

    def make_task(self) -> Task:
        """The task of this head. Raises ValueError for an invalid description."""
        try:
            return make_task(self.task, self.labels, self.parameters)
        except ValueError as error:
            raise ValueError(f"head {self.name!r}: {error}") from error


class TaskHead:
    """A head's spec and its weight [rows, features] and bias [rows].

    Args:
        hidden: weight [hidden_units, hidden_size] and bias of the layer before the rows; None without one. The features
            are its units, else the hidden states.

    Raises:
        ValueError: if shapes do not match the spec or values are not finite.
    """

    def __init__(
        self,
        spec: HeadSpec,
        weight: torch.Tensor,
        bias: torch.Tensor,
        hidden: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.task = spec.make_task()
        count, units = self.task.num_outputs, spec.hidden_units
        features = units or spec.hidden_size
        if tuple(weight.shape) != (count, features) or tuple(bias.shape) != (count,):
            raise ValueError(
                f"head {spec.name!r}: weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit "
                f"{count} rows ({spec.task}, {len(spec.labels)} labels) over {features} features"
            )
        shapes = [tuple(tensor.shape) for tensor in hidden or ()]
        if shapes != ([(units, spec.hidden_size), (units,)] if units else []):
            raise ValueError(
                f"head {spec.name!r}: weight and bias of the hidden layer are {shapes or 'absent'}; they do not fit "
                f"{units} units over {spec.hidden_size} features"
            )
        if not all(torch.isfinite(tensor).all() for tensor in (weight, bias, *(hidden or ()))):
            raise ValueError(f"head {spec.name!r}: weight or bias has values that are not finite (NaN or infinity)")
        self.spec = spec
        self.weight = weight
        self.bias = bias
        self.hidden = hidden

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> TaskHead:
        """The same head on another device or in another dtype."""
        weight, bias, *hidden = (tensor.to(device, dtype) for tensor in (self.weight, self.bias, *(self.hidden or ())))
        return TaskHead(self.spec, weight, bias, (hidden[0], hidden[1]) if hidden else None)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The logits [n, outputs] of rows [n, hidden_size] of what the head reads, in the dtype of its weight.

        Inputs are normalised by their root mean square, since their scale depends on the vision tower.
        """
        rows = rows.to(self.weight.dtype)
        if self.hidden is not None:
            rows = F.gelu(F.linear(F.rms_norm(rows, rows.shape[-1:]), *self.hidden))
        return F.linear(rows, self.weight, self.bias)

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """Decode this head's logits to an answer; `Task` documents their shape."""
        return self.task.decode(logits, grids)
