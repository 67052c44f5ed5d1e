"""Installation of the simulated device in a process: torch's CUDA interface, threads, attention and Triton."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from tests.simulated_cuda import capture, streams
from tests.simulated_cuda.counts import Kind
from tests.simulated_cuda.tensor import (
    CUDA,
    DeviceMismatch,
    SimulatedMode,
    SimulatedTensor,
    conversion,
    upload,
)


class CUDAGraph:
    """A captured graph. operations: as they were captured."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: capture.Capture | None = None

    @property
    def operations(self) -> list[capture.Operation]:
        assert self._capture is not None, "nothing was captured"
        return self._capture.operations

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        if streams.current_stream() is streams.default_stream():
            raise capture.CaptureError("the default stream cannot be captured")
        self._capture = capture.begin(streams.current_stream(), capture_error_mode)

    def capture_end(self) -> None:
        capture.end()

    def replay(self) -> None:
        assert self._capture is not None, "nothing was captured"
        streams.count(Kind.LAUNCH, "graph")
        with torch._C._DisableTorchDispatch():
            self._capture.replay()


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
) -> Iterator[None]:
    """`torch.cuda.graph`."""
    streams.synchronize()
    with streams.use_stream(stream or streams.Stream(name="capture")):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def graph_pool_handle() -> tuple[int, int]:
    return 0, 1


def is_capturing() -> bool:
    return capture.current() is not None


_PROPERTIES = SimpleNamespace(
    name="Simulated", major=9, minor=0, total_memory=4 * 2**30, multi_processor_count=132, L2_cache_size=50 * 2**20
)


@contextmanager
def simulated_cuda() -> Iterator[None]:
    """Context in which `cuda` is the simulated device, in this thread and in threads that start meanwhile.

    Triton kernels are interpreted only if the process has `TRITON_INTERPRET=1` from its start.
    """
    _device_constructors()  # torch caches these functions for `with torch.device(...)`, so ask before replacing them
    with ExitStack() as stack:
        for owner, replacements in _replacements():
            for name, value in replacements.items():
                missing = name == "ProcessGroupNCCL"  # in torch's builds for the CPU
                stack.enter_context(mock.patch.object(owner, name, value, create=missing))
        stack.enter_context(SimulatedMode())
        yield


def _replacements() -> Iterator[tuple[Any, dict[str, Any]]]:
    yield (
        torch.cuda,
        {
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "is_current_stream_capturing": is_capturing,
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "graph_pool_handle": graph_pool_handle,
            "device_count": lambda: 2,  # one per rank
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "get_device_name": lambda device=None: _PROPERTIES.name,
            "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
            "get_device_properties": lambda device=None: _PROPERTIES,
            "mem_get_info": lambda device=None: (_PROPERTIES.total_memory // 2, _PROPERTIES.total_memory),
            "empty_cache": lambda: None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),  # the host draws for the device
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "synchronize": streams.synchronize,
            "Stream": streams.Stream,
            "Event": streams.Event,
            "stream": streams.use_stream,
            "current_stream": streams.current_stream,
            "default_stream": streams.default_stream,
        },
    )
    # In inference mode torch rejects views of a subclass's tensors that were made outside of it.
    yield (
        torch,
        {
            "tensor": _made_on(torch.tensor),
            "as_tensor": _made_on(torch.as_tensor),
            "inference_mode": lambda *_: torch.no_grad(),
        },
    )
    yield (
        torch.Tensor,
        {
            "to": _to,
            "cuda": lambda tensor, *_, **__: upload(tensor, None, False, "cuda"),
            "pin_memory": lambda tensor, *_, **__: streams.pinned.register(tensor.clone()),
            "is_pinned": lambda tensor, *_, **__: streams.pinned.holds(tensor),
        },
    )
    yield torch.nn.Module, {"to": _module_to}
    yield F, {"scaled_dot_product_attention": _attention}
    yield threading.Thread, {"_bootstrap_inner": _in_thread}
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime.interpreter import GridExecutor

        from atmm import operator
        from atmm.strategies import registry
        from atmm.triton import attention, merging, pointwise, products
        from tests.simulated_cuda import ranks
        from tests.simulated_cuda.kernels_in_torch import (
            decode_in_torch,
            lanes_in_torch,
            merging_in_torch,
            pointwise_in_torch,
            products_in_torch,
        )
        from vlora.engine.tensor_parallel import worker

        yield torch.distributed, {"ProcessGroupNCCL": ranks.SimulatedNCCL}
        yield worker, {"main": ranks.main}
        # Tensors on the host are computed as on any CPU, not by the interpreter.
        yield registry, {"triton_interprets": lambda: False}
        yield attention, {"decode": decode_in_torch(attention.decode)}
        yield pointwise, pointwise_in_torch(pointwise)
        yield merging, merging_in_torch(merging)
        yield products, products_in_torch(products)
        yield operator, {"strategy_in_place": lanes_in_torch(operator.strategy_in_place)}
        yield (
            GridExecutor,
            {
                "__call__": _launcher(GridExecutor.__call__),
                "_init_args_hst": lambda self, args, kwargs: (list(args), dict(kwargs)),
                "_restore_args_dev": lambda self, *_: None,
            },
        )


def _made_on(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that creates a tensor from host data, with a copy if the tensor is on the device."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, SimulatedTensor):
            return data.to(device=device or CUDA, **kwargs)
        contexts = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
        if torch.device(device or (contexts[-1] if contexts else "cpu")).type != "cuda":
            return make(data, *args, device=device, **kwargs)
        return upload(make(data, *args, device="cpu", **kwargs), None, False, f"torch.{make.__name__}")

    return made


_plain_to = torch.Tensor.to


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to` of a host tensor. torch itself would ask a driver for the index of the device."""
    target = conversion(tensor, args, kwargs)
    if target.device is None or target.device.type != "cuda":
        return _plain_to(tensor, *args, **kwargs)
    return upload(tensor, target.dtype, target.non_blocking, "to")


_plain_module_to = torch.nn.Module.to


def _module_to(module: Any, *args: Any, **kwargs: Any) -> Any:
    """`Module.to`. Parameters that several modules share stay shared, as torch keeps them on a GPU."""
    device = conversion(torch.empty(0), args, kwargs).device
    if device is None or device.type != "cuda":
        return _plain_module_to(module, *args, **kwargs)
    moved: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = made = tensor.detach().to(*args, **kwargs)
                    # torch recognizes parameters of other classes by this attribute.
                    made._is_param = isinstance(tensor, torch.nn.Parameter)  # type: ignore[attr-defined]
                tensors[name] = moved[id(tensor)]
    return module


_plain_attention = F.scaled_dot_product_attention


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Scaled-dot-product attention as one launch; torch divides it differently on every device."""
    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    if not any(isinstance(tensor, SimulatedTensor) for tensor in tensors):
        return _plain_attention(query, key, value, attn_mask, *args, **kwargs)
    if not all(isinstance(tensor, SimulatedTensor) for tensor in tensors):
        raise DeviceMismatch("scaled_dot_product_attention: operands on cuda:0 and on the host")
    if capture.current() is not None:
        raise NotImplementedError("the simulated device does not capture scaled_dot_product_attention")
    streams.count(Kind.LAUNCH, "scaled_dot_product_attention")
    backings: list[Any] = [None if tensor is None else tensor.backing for tensor in (query, key, value, attn_mask)]
    with torch._C._DisableTorchDispatch():
        return SimulatedTensor(_plain_attention(*backings, *args, **kwargs))


_plain_bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]


def _in_thread(thread: threading.Thread) -> None:
    """Run a new thread's function on the device: dispatch modes belong to threads."""
    with SimulatedMode():
        _plain_bootstrap(thread)


@contextmanager
def uncomputed_kernels() -> Iterator[None]:
    """Context in which Triton kernels are counted and not computed, for counts of steps: the interpreter is slow.

    What the kernels would write is undefined.
    """
    from triton.runtime.interpreter import GridExecutor

    with mock.patch.object(GridExecutor, "__call__", _launcher(lambda *_, **__: None)):
        yield


def _launcher(launch: Callable[..., None]) -> Callable[..., None]:
    """The launch of a Triton kernel in the interpreter, on tensors of the device only."""

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        name = executor.fn.__name__
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        wrong = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, SimulatedTensor)]
        if wrong:
            raise DeviceMismatch(f"Triton kernel {name}: tensors on the host: {wrong}")
        streams.count(Kind.LAUNCH, f"triton {name}")
        host_args, host_kwargs = list(map(_backing, args)), {key: _backing(arg) for key, arg in kwargs.items()}
        with torch._C._DisableTorchDispatch():
            launch(executor, *host_args, **host_kwargs)
        if (captured := capture.current()) is not None:
            arguments = executor.grid, *host_args, *host_kwargs.values()
            captured.record(name, arguments, lambda: launch(executor, *host_args, **host_kwargs))

    return launched


def _backing(value: Any) -> Any:
    return value.backing if isinstance(value, SimulatedTensor) else value
