"""A client of a base executor: `connect`, then `Base.wrap` for any transformers model."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from vlora.errors import BadConfig, listed
from vlora.split.connection import BaseConnection, ExecutorCalls, LayerCalls
from vlora.split.frames import Direction
from vlora.split.layers import digest, frozen_layers, weight_of
from vlora.split.noise import Noise, NoisyCalls, require_another


def _check_shards(shards: Sequence[BaseConnection]) -> None:
    """Raise BadConfig if these are not all shards of one base, in their order."""
    given = [each.info.shard for each in shards]
    if given != [(index, len(shards)) for index in range(len(shards))]:
        stated = ", ".join(f"{index + 1}/{number}" for index, number in given)
        raise BadConfig(f"these executors serve the shards {stated}; give the addresses of all shards, each once")
    shapes = {tuple((layer.name, layer.d_in, layer.d_out) for g in each.groups for layer in g) for each in shards}
    if len(shapes) > 1 or len({each.dtype for each in shards}) > 1:
        raise BadConfig("these executors serve different base models; give the shards of one")


_Model = TypeVar("_Model", bound=nn.Module)


def connect(
    *addresses: str,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    noise: Noise | None = None,
    patience_s: float = 60.0,
) -> Base:
    """Connect to a base executor (`vlora base serve`), or to all shards of one.

    Args:
        addresses: HOST:PORT, or unix:PATH on the same machine, where tensors travel in shared memory.
        token: The client's token. It is never sent; the executor and the client prove to each other that they know it.
            An executor that has no tokens, or does not know this one, is refused.
        tls: For an executor with a certificate, such as `ssl.create_default_context(cafile=...)`.
        noise: Noise that hides activations and gradients from the executor; see `Noise` for what it protects against.
        patience_s: How long a call waits for an executor that does not answer. Calls are repeated when it comes back.

    Raises:
        BadConfig: An address or a setting is invalid, or the addresses are not all shards of one base.
        Unauthorized: The token is missing, wrong or expired, or the executor does not prove that it knows it.
        OverCapacity: The executor has too many clients.
        Disconnected: There is no executor at an address.
    """
    if not addresses:
        raise BadConfig("connect needs the address of a base executor: HOST:PORT or unix:PATH")

    with contextlib.ExitStack() as opened:  # closed again if a later step fails

        def open_one(address: str) -> BaseConnection:
            connection = BaseConnection(address, token=token, tls=tls, patience_s=patience_s)
            opened.callback(connection.close)
            return connection

        executors = sorted(map(open_one, addresses), key=lambda each: each.info.shard)
        _check_shards(executors)
        calls: LayerCalls = ExecutorCalls(tuple(executors))
        if noise is not None:
            second = None
            if noise.second is not None:
                other = open_one(noise.second)
                require_another(executors, other, noise.second)
                executors.append(other)
                second = ExecutorCalls((other,))
            calls = NoisyCalls(calls, noise, second)
        opened.pop_all()
    return Base(calls, executors)


class Base:
    """The base model behind one or several connections. A context manager that closes them."""

    def __init__(self, calls: LayerCalls, executors: Collection[BaseConnection]) -> None:
        """executors: all that `calls` uses, among them one that computes effects of noise."""
        self._calls = calls
        self._executors = executors

    def __enter__(self) -> Base:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Wrapped models cannot compute afterwards."""
        self._calls.close()

    @property
    def calls(self) -> LayerCalls:
        return self._calls

    @property
    def num_repeated(self) -> int:
        """Calls that were repeated because a connection broke."""
        return sum(executor.num_repeated for executor in self._executors)

    def wrap(self, model: _Model, *, keep: Collection[str] = ()) -> _Model:
        """Replace the frozen linear layers of a model by calls to the base, in place, and free their weights.

        Afterwards the model is used as before: adapt it with PEFT, train it with transformers' Trainer, generate.

        Args:
            model: A transformers model of the same checkpoint as the base. Its layers may be on the meta device.
            keep: Names, or last parts of names, of layers that stay with the client, for `modules_to_save` and for
                adapters that need the base's weights, such as DoRA.

        Returns:
            The model. Its remaining parameters are frozen.

        Raises:
            BadConfig: The model has other layers, shapes or weights than the base; it is unchanged then.
        """
        own = frozen_layers(model)
        kept = {name for name in own if name in keep or name.rpartition(".")[2] in keep}
        for group in self._calls.groups:
            for layer in group:
                if layer.name not in kept:
                    self._check(own.get(layer.name), layer.name, own)
        for index, group in enumerate(self._calls.groups):
            places = [place for place, layer in enumerate(group) if layer.name not in kept]
            shared = VirtualGroup(self._calls, index, places)
            for place in places:
                make_virtual(own[group[place].name], shared, place)
        model.requires_grad_(False)
        return model

    def _check(self, layer: nn.Module | None, name: str, own: Collection[str]) -> None:
        """Raise BadConfig unless the layer has the base's shape and values."""
        model = next(iter(self._executors)).info.model
        if layer is None:
            raise BadConfig(
                f"the base executor serves {model!r}, with a layer {name!r} that this model lacks; its own layers are "
                f"{listed(own)}: wrap a model of the base's checkpoint"
            )
        for executor in self._executors:
            info = next(each for group in executor.groups for each in group if each.name == name)
            shape = tuple(weight_of(layer).shape)
            if shape != (info.d_out, info.d_in):
                raise BadConfig(
                    f"the base executor serves {model!r} with a layer {name!r} of shape {[info.d_out, info.d_in]}; "
                    f"this model's has {list(shape)}: wrap a model of the base's checkpoint"
                )
            found = digest(layer, info.first, info.last, getattr(torch, executor.info.dtype))
            if found and found != info.digest:
                raise BadConfig(
                    f"the base executor serves {model!r}, and its layer {name!r} has other weights than this model's: "
                    "wrap a model of the base's checkpoint"
                )


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


_HARMLESS = frozenset((
    "__get__", "__set__", "__hash__", "__repr__", "__len__", "__format__", "size", "dim", "ndimension", "numel",
    "nelement", "stride", "element_size", "storage_offset", "data_ptr", "untyped_storage", "is_floating_point",
    "is_complex", "is_contiguous", "is_shared", "is_pinned", "requires_grad_", "has_names", "get_device",
    "register_hook", "retain_grad", "is_inference",
))  # fmt: skip


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
    """The common part of both classes of virtual layers.

    They are instances of the classes that they replace, so PEFT adapts them like any other layer. Their weights have a
    shape, a type and a device, but no values.
    """

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
