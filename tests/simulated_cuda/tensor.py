"""Tensors of the simulated device, and the execution of operators on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.atmm.flash_oracle import varlen_attn_2_11
from tests.simulated_cuda import capture
from tests.simulated_cuda.counts import Kind
from tests.simulated_cuda.streams import count, pinned

CUDA = torch.device("cuda:0")

# Operators that allocate or inspect only. Views are recognized by their schema.
_CREATES = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_INSPECTS = ("is_same_size", "is_set_to", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
_WITHOUT_LAUNCH = frozenset((*_CREATES, *_INSPECTS, "_unsafe_view", "resize_", "set_"))
_ITEM = frozenset(("_local_scalar_dense", "equal", "is_nonzero"))
_UNIQUE = ("_unique", "_unique2", "unique_consecutive", "unique_dim")
_NONZERO = frozenset((*_UNIQUE, "nonzero", "masked_select", "bincount", "repeat_interleave"))
# Operators that accept scalar tensors of the host, besides pointwise ones.
_TAKES_HOST_SCALARS = frozenset(("masked_fill", "masked_fill_", "fill_", "index_fill", "index_fill_", "where"))
_INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))


class DeviceMismatch(RuntimeError):
    """An operator got operands on the host and on the device."""


class SimulatedTensor(torch.Tensor):
    """A tensor of the device `cuda:0` with its values in a CPU tensor, `backing`. Views share memory as on a GPU."""

    backing: torch.Tensor

    @staticmethod
    def __new__(cls, backing: torch.Tensor) -> SimulatedTensor:
        assert not isinstance(backing, SimulatedTensor)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            backing.size(),
            strides=backing.stride(),
            storage_offset=backing.storage_offset(),
            dtype=backing.dtype,
            layout=backing.layout,
            device=torch.device("cpu"),
        )
        made.backing = backing.detach()
        return made

    def __init__(self, backing: torch.Tensor) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, SimulatedTensor):
            raise DeviceMismatch("the data of a tensor on cuda:0 was set to a tensor on the host")
        if (value.shape, value.stride(), value.dtype) != (self.shape, self.stride(), self.dtype):
            raise NotImplementedError("the simulated device sets the data of a tensor to equal shapes only")
        self.backing = value.backing

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return download(self, self.dtype, "cpu")

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = conversion(self, args, kwargs)
        dtype = target.dtype or self.dtype
        if target.device is not None and target.device.type == "cpu":
            return download(self, dtype, "to")
        if dtype == self.dtype and not kwargs.get("copy"):
            return self
        return torch.ops.aten._to_copy(self, dtype=dtype)

    def tolist(self) -> Any:
        return download(self, self.dtype, "tolist").tolist()

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.numpy()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:  # type: ignore[override]
        return upload(torch.tensor(data, dtype=dtype or self.dtype), None, False, "new_tensor")

    def data_ptr(self) -> int:
        return self.backing.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.backing.untyped_storage()

    def is_set_to(self, other: torch.Tensor) -> bool:
        return isinstance(other, SimulatedTensor) and self.backing.is_set_to(other.backing)

    def record_stream(self, _: Any) -> None:
        """Nothing is freed early here: memory lives as long as its tensors."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), SimulatedTensor(self.backing.clone()))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return execute(func, args, kwargs or {})


class SimulatedMode(TorchDispatchMode):
    """Creates tensors on the simulated device. A mode applies to the thread that enters it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that turns compilation off costs a fifth of a call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and SimulatedTensor not in types:
            return func(*args)
        return execute(func, args, kwargs or {})


# -- copies -----------------------------------------------------------------------------------------------------------


class Conversion:
    """The arguments of `Tensor.to`."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device | None, non_blocking: bool) -> None:
        self.dtype, self.device, self.non_blocking = dtype, device, non_blocking


def conversion(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Conversion:
    """Parse the arguments of `tensor.to(*args, **kwargs)`."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    flags = []
    for arg in (*args, kwargs.get("other")):
        if isinstance(arg, torch.Tensor):
            dtype, device = arg.dtype, arg.device
        elif isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, str | torch.device):
            device = arg
        elif isinstance(arg, bool):
            flags.append(arg)
    non_blocking = kwargs.get("non_blocking", flags[0] if flags else False)
    return Conversion(dtype, None if device is None else torch.device(device), non_blocking)


def upload(tensor: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool, name: str) -> SimulatedTensor:
    """Copy a host tensor to the device."""
    _count_upload(tensor, non_blocking, name)
    with torch._C._DisableTorchDispatch():
        return SimulatedTensor(tensor.detach().to(dtype or tensor.dtype, copy=True))


def download(tensor: SimulatedTensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Copy a device tensor to the host, which waits for it."""
    count(Kind.D2H, name)
    with torch._C._DisableTorchDispatch():
        return tensor.backing.to(dtype, copy=True)


def _count_upload(source: torch.Tensor, non_blocking: bool, name: str) -> None:
    if non_blocking and pinned.holds(source):
        count(Kind.H2D_ASYNC, name)
        pinned.begin_upload(source)
    else:
        count(Kind.H2D_BLOCKING, f"{name} from pageable memory" if non_blocking else name)


# -- operators --------------------------------------------------------------------------------------------------------


def execute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator on the CPU, count it, and return tensors on the device where a GPU would.

    Raises:
        DeviceMismatch: operands are on two devices.
    """
    tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
    simulated = [tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)]
    device = kwargs.get("device")
    device = None if device is None else torch.device(device)
    creates = device is not None and device.type == "cuda"
    if not simulated and not creates:
        return _on_host(func, args, kwargs)
    if _is_composite(func):
        with SimulatedMode():
            return func.decompose(*args, **kwargs)
    name = func.overloadpacket.__name__
    if name == "_to_copy":
        return _convert(args[0], device, kwargs)
    if name == "copy_" and len(simulated) < len(tensors):
        return _copy(*args, **kwargs)
    host = [tensor for tensor in tensors if not isinstance(tensor, SimulatedTensor)]
    if simulated and host:
        _check_devices(func, name, args, simulated, host)
    _count(func, name, args, kwargs)
    host_args = _map(_backing, args)
    host_kwargs = {key: _map(_backing, value) for key, value in kwargs.items()}
    if creates:
        host_kwargs["device"] = torch.device("cpu")
    if name == "_varlen_attn":
        with torch._C._DisableTorchDispatch():
            out = _varlen_attention(func._schema, host_args, host_kwargs)
    else:
        out = func(*host_args, **host_kwargs)
    if device is not None and not creates:
        return out
    if capture.current() is not None and not _is_view(func):
        _record(func, name, host_args, host_kwargs, out)
    known = {id(tensor.backing): tensor for tensor in simulated}
    return _map(functools.partial(_outer, known), out)


def _record(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Add an operator to the capture that is underway. Operands and results are host tensors."""
    captured = capture.current()
    assert captured is not None
    if name == "_varlen_attn":
        raise NotImplementedError("the simulated device does not capture varlen_attn")
    operands = {tensor.untyped_storage().data_ptr() for tensor in _tensors((*args, *kwargs.values()))}
    made = [tensor for tensor in _results(out) if tensor.untyped_storage().data_ptr() not in operands]
    captured.allocate(made)
    if name in _CREATES:
        return

    def again() -> None:
        new = func(*args, **kwargs)
        for target, source in zip(_results(out), _results(new), strict=True):
            if target is not source and target.data_ptr() != source.data_ptr():
                target.copy_(source)

    captured.record(name, (out, *args, *(item for pair in kwargs.items() for item in pair)), again)


def _varlen_attention(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Torch's flash kernel for packed sequences. The other outputs, used in training, are empty.

    schema: of `torch_attn::_varlen_attn`, which differs between versions of torch.
    """
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    causal = given["is_causal"]
    whole = given.get("window_size") in (None, [-1, 0 if causal else -1])
    if not whole or given.get("seqused_k") is not None or given.get("block_table") is not None:
        raise NotImplementedError("the simulated device has no windows and no pages in varlen_attn")
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    window = (-1, 0 if causal else -1)
    out = varlen_attn_2_11(*(given[name] for name in names), scale=given["scale"], window_size=window)
    return out, torch.empty(out.shape[1], len(out)), torch.empty(2, dtype=torch.uint64)


def _results(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(_tensors(out)) if isinstance(out, list | tuple) else []


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    return pinned.register(func(*args, **{**kwargs, "pin_memory": False}))


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether the operator consists of others. In inference mode these reach a tensor subclass undivided."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _is_view(func: Any) -> bool:
    returns = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments, which are at most lists of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to those in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([_map(function, part) for part in value])
    return function(value)


def _backing(value: Any) -> Any:
    return value.backing if isinstance(value, SimulatedTensor) else value


def _outer(known: dict[int, SimulatedTensor], value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = known.get(id(value))
    if tensor is None:
        return SimulatedTensor(value)
    if tensor.shape != value.shape or tensor.stride() != value.stride():
        raise NotImplementedError("the simulated device cannot change the shape of a tensor in place")
    return tensor


def _convert(source: torch.Tensor, device: torch.device | None, kwargs: dict[str, Any]) -> Any:
    """`_to_copy`: a copy between devices, or a conversion on the device."""
    dtype = kwargs.get("dtype")
    if not isinstance(source, SimulatedTensor):
        return upload(source, dtype, kwargs.get("non_blocking", False), "to")
    if device is not None and device.type == "cpu":
        return download(source, dtype or source.dtype, "to")
    count(Kind.LAUNCH, "_to_copy")
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    made = source.backing.to(dtype or source.dtype, copy=True, memory_format=memory_format)
    if (captured := capture.current()) is not None:
        captured.allocate([made])
        captured.record("_to_copy", (made, source.backing), functools.partial(made.copy_, source.backing))
    return SimulatedTensor(made)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`copy_` between the devices."""
    if isinstance(target, SimulatedTensor):
        _count_upload(source, non_blocking, "copy_")
    elif non_blocking and pinned.holds(target) and isinstance(source, SimulatedTensor):
        count(Kind.D2H_ASYNC, "copy_")
        pinned.begin_download(target, source.backing.to(target.dtype, copy=True))
        return target
    else:
        count(Kind.D2H, "copy_")
    torch.ops.aten.copy_(_backing(target), _backing(source))
    return target


def _check_devices(
    func: Any, name: str, args: tuple[Any, ...], simulated: list[SimulatedTensor], host: list[torch.Tensor]
) -> None:
    if name in _INDEXING:
        # Indices of the host are copied to the device; values must be there, except for scalars.
        wrong = [args[0]] * (not isinstance(args[0], SimulatedTensor))
        wrong += [value for value in args[2:3] if not isinstance(value, SimulatedTensor) and value.dim()]
    elif torch.Tag.pointwise in func.tags or name in _TAKES_HOST_SCALARS:
        wrong = [tensor for tensor in host if tensor.dim()]
    else:
        wrong = host
    if wrong:
        raise DeviceMismatch(
            f"{func.name()}: expected all tensors to be on the same device, but found cuda:0 "
            f"{[tuple(tensor.shape) for tensor in simulated]} and cpu {[tuple(tensor.shape) for tensor in wrong]}"
        )


def _count(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _is_view(func) or name in _WITHOUT_LAUNCH:
        return
    if name in _ITEM:
        count(Kind.ITEM, name)
    elif name in _NONZERO and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        count(Kind.NONZERO, name)
    elif name in _INDEXING:
        _count_indices(name, args)
        count(Kind.LAUNCH, name)
    else:
        count(Kind.LAUNCH, name)


def _count_indices(name: str, args: tuple[Any, ...]) -> None:
    indices = [index for index in args[1] if index is not None]
    # One boolean mask with a host scalar is filled without reading the mask's size.
    fills = name != "index" and len(indices) == 1 and not isinstance(args[2], SimulatedTensor)
    for index in indices:
        if not isinstance(index, SimulatedTensor):
            count(Kind.H2D_BLOCKING, f"{name} with indices of the host")
        if index.dtype in (torch.bool, torch.uint8) and not fills:
            count(Kind.BOOLEAN_INDEX, name)
