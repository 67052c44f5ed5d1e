"""Virtual layers: linear layers with their weights at a base executor, by a change of class.

They are instances of the classes that they replace, so PEFT adapts them like any other layer. Their weights have a
shape, a type and a device, but no values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from vlora.errors import BadConfig
from vlora.split.connection import LayerCalls
from vlora.split.frames import Direction


class VirtualWeight(nn.Parameter):
    """A frozen parameter of one stored element that is expanded to a shape; its value is never used.

    Functions that would compute with it raise BadConfig: initializations and adapters that need the base's weights
    (DoRA, PiSSA, merging) would otherwise produce numbers without meaning.
    """

    @staticmethod
    def of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> VirtualWeight:
        return VirtualWeight(torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape), requires_grad=False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ not in _HARMLESS:
            raise BadConfig(
                f"the weights of a virtual layer are at the base executor, and {func.__name__} needs their values; "
                "DoRA, PiSSA, merging and modules_to_save need layers of the client: Base.wrap(model, keep=[NAME])"
            )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (torch)
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> VirtualWeight:
        raise BadConfig(
            "a virtual layer cannot be copied, because its weights are at the base executor; keep layers of "
            "modules_to_save with the client: Base.wrap(model, keep=[NAME])"
        )


_HARMLESS = frozenset(
    (
        "__get__",
        "__set__",
        "__hash__",
        "__repr__",
        "__len__",
        "__format__",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "storage_offset",
        "data_ptr",
        "untyped_storage",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_shared",
        "is_pinned",
        "requires_grad_",
        "has_names",
        "get_device",
        "register_hook",
        "retain_grad",
        "is_inference",
    )
)


class _Product(torch.autograd.Function):
    """A group's products. Saves no tensors: the gradient of a frozen layer's input needs the weights only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: VirtualGroup) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.lead, ctx.like = group, x.shape[:-1], (x.dtype, x.device)
        ctx.set_materialize_grads(False)
        made = group.calls.call(Direction.FORWARD, group.index, _mask(group.places), [group.rows_of(x)])
        return tuple(y.to(x.device, x.dtype).view(*ctx.lead, y.shape[1]) for y in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        group = ctx.group
        given = [(place, grad) for place, grad in zip(group.places, grads, strict=True) if grad is not None]
        if not given:
            return None, None
        dtype, device = ctx.like
        rows = [group.rows_of(grad) for _, grad in given]
        (dx,) = group.calls.call(Direction.BACKWARD, group.index, _mask(place for place, _ in given), rows)
        return dx.to(device, dtype).view(*ctx.lead, dx.shape[1]), None


class _Held(threading.local):
    """A thread's outputs that are not used yet. Threads that share a model must not use each other's.

    Attributes:
        state: The input, its version, and whether gradients were on.
    """

    state: tuple[torch.Tensor, int, bool] | None = None
    outputs: dict[int, torch.Tensor] | None = None


class VirtualGroup:
    """Layers that read one input. The first one that is called computes all of them; each output is used once.

    Threads may share it: each uses the outputs of its own input. Copies hold no outputs.
    """

    def __init__(self, calls: LayerCalls, index: int, places: Sequence[int]) -> None:
        self.calls = calls
        self.index = index
        self.places = tuple(places)
        self._held = _Held()

    def __reduce__(self) -> tuple[type[VirtualGroup], tuple[LayerCalls, int, tuple[int, ...]]]:
        return VirtualGroup, (self.calls, self.index, self.places)

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] in the base's type and in host memory."""
        return x.detach().reshape(-1, x.shape[-1]).to("cpu", self.calls.dtype)

    def output(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            layer = self.calls.groups[self.index][place]
            return x.new_zeros(*x.shape[:-1], layer.d_out)
        state = (x, _version(x), torch.is_grad_enabled())
        held, outputs = self._held, self._held.outputs
        if held.state is None or held.state[0] is not x or held.state[1:] != state[1:]:
            outputs = None
        if outputs is None or place not in outputs:
            made = _Product.apply(x, self)  # type: ignore[no-untyped-call]
            outputs = dict(zip(self.places, made, strict=True))
        found = outputs.pop(place)
        held.state, held.outputs = (state, outputs) if outputs else (None, None)
        return found


def _version(x: torch.Tensor) -> int:
    """Number of changes in place; unknown for tensors of inference mode."""
    return 0 if x.is_inference() else x._version  # noqa: SLF001  (torch)


def _mask(places: Iterable[int]) -> int:
    return sum(1 << place for place in places)


class _Virtual(nn.Module):
    """The common part of both classes of virtual layers."""

    group: VirtualGroup
    place: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.output(self.place, x)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move to another device or type without storage for the values."""
        for name, old in list(self._parameters.items()):
            if old is not None:
                probe = fn(torch.zeros(1, dtype=old.dtype, device=old.device))
                self._parameters[name] = VirtualWeight.of(old.shape, probe.dtype, probe.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """A virtual layer has nothing to save."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """A virtual layer has nothing to load."""


class VirtualLinear(_Virtual, nn.Linear):
    """`nn.Linear` with its weights at a base executor."""


class VirtualConv1D(_Virtual, Conv1D):
    """GPT-2's `Conv1D` with its weights at a base executor."""


_CLASSES: Mapping[type, type] = {nn.Linear: VirtualLinear, Conv1D: VirtualConv1D}


def make_virtual(layer: nn.Module, group: VirtualGroup, place: int) -> None:
    for name, old in list(layer.named_parameters(recurse=False)):
        device = torch.device("cpu") if old.is_meta else old.device
        setattr(layer, name, VirtualWeight.of(old.shape, old.dtype, device))
    layer.__class__ = _CLASSES[type(layer)]
    layer.group, layer.place = group, place  # type: ignore[assignment]
