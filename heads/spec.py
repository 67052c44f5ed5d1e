"""What a task head is: rows over the hidden state of the last prompt token, and how their logits become an answer."""

from __future__ import annotations

import dataclasses

import torch

from heads.tasks import TASKS, Decision


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head's description: what it was trained to answer, and on what input.

    prompt: the question put to the model, exactly as in training. num_frames: images it expects in one request.
    Raises ValueError when a field cannot work.
    """

    name: str
    task: str
    labels: tuple[str, ...]
    prompt: str
    num_frames: int
    hidden_size: int

    def __post_init__(self) -> None:
        for field, kind in (("name", str), ("task", str), ("prompt", str), ("num_frames", int), ("hidden_size", int)):
            value = getattr(self, field)
            if not isinstance(value, kind):
                raise ValueError(f"head {self.name!r}: {field} is {value!r}; expected {kind.__name__}")
        if not all(isinstance(label, str) and label for label in self.labels):
            raise ValueError(f"head {self.name!r}: labels are {self.labels!r}; every label must be a word or more")
        if not self.name:
            raise ValueError("name is empty; a head needs a name to be asked for")
        if self.task not in TASKS:
            raise ValueError(f"head {self.name!r}: task is {self.task!r}; known: {', '.join(sorted(TASKS))}")
        if len(self.labels) < 2 or len(set(self.labels)) != len(self.labels):
            raise ValueError(f"head {self.name!r}: labels are {self.labels!r}; two or more different ones are needed")
        if not self.prompt.strip():
            raise ValueError(f"head {self.name!r}: prompt is empty; give the question it is trained with")
        if self.num_frames < 1:
            raise ValueError(f"head {self.name!r}: num_frames is {self.num_frames}; it must be at least 1")
        if self.hidden_size < 1:
            raise ValueError(f"head {self.name!r}: hidden_size is {self.hidden_size}; it must be at least 1")


class TaskHead:
    """weight [labels, hidden], bias [labels]. Raises ValueError when shapes do not fit the spec or values are not
    finite."""

    def __init__(self, spec: HeadSpec, weight: torch.Tensor, bias: torch.Tensor) -> None:
        count = len(spec.labels)
        if tuple(weight.shape) != (count, spec.hidden_size) or tuple(bias.shape) != (count,):
            raise ValueError(
                f"head {spec.name!r}: weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit "
                f"{count} labels over {spec.hidden_size} features"
            )
        if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
            raise ValueError(f"head {spec.name!r}: weight or bias holds values that are not finite (NaN or infinity)")
        self.spec = spec
        self.weight = weight
        self.bias = bias

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> TaskHead:
        """The same head elsewhere or in another precision."""
        return TaskHead(self.spec, self.weight.to(device, dtype), self.bias.to(device, dtype))

    def decode(self, logits: torch.Tensor) -> Decision:
        """Turn this head's logits [labels] into an answer."""
        return TASKS[self.spec.task].decode(logits, self.spec.labels)
