"""Merge fidelity against float64, and the work on a device: batches on a separate stream, one copy of the result."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlora.lora import merge_fidelity as module
from vlora.lora.adapted_linear import LaneScope, adapt
from vlora.lora.base_weights import CopiedBaseWeights
from vlora.lora.layout import HostFactors
from vlora.lora.merge_fidelity import MergeFidelity
from vlora.lora.weight_slabs import WeightSlabs

SHAPES = {"self_attn.q_proj": (96, 64), "self_attn.k_proj": (40, 64), "mlp.down_proj": (130, 112)}
MOST_LAUNCHES = 15  # of one batch: 12 kernels, the copy to the device, and two copies within host memory


def make_slabs(num_layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> WeightSlabs:
    torch.manual_seed(0)
    linears = {}
    for layer in range(num_layers):
        for kind, (d_out, d_in) in SHAPES.items():
            linear = nn.Linear(d_in, d_out, bias=False, dtype=dtype).requires_grad_(False)
            name = f"model.language_model.layers.{layer}.{kind}"
            linears[name] = adapt(linear, name, LaneScope())
    return WeightSlabs(linears)


def make_factors(slabs: WeightSlabs, size: float = 1.0, *, ranks: tuple[int, ...] = (8,)) -> dict[str, HostFactors]:
    generator = torch.Generator().manual_seed(1)
    factors = {}
    for number, name in enumerate(slabs.order):
        rank = ranks[number % len(ranks)]
        d_out, d_in = slabs.entry(name).shape
        pair = (torch.randn(rank, d, generator=generator) for d in (d_in, d_out))
        scale = size * float(slabs.entry(name).float().std()) / rank**0.5
        factors[name] = HostFactors(*((factor * scale**0.5).to(slabs.entry(name).dtype) for factor in pair))
    return factors


def expected(weights: Mapping[str, torch.Tensor], factors: Mapping[str, HostFactors], num_rows: int = 64) -> float:
    """The definition, layer by layer in float64."""
    lost = total = 0.0
    for name, (a, bt) in factors.items():
        if name in weights:
            step = max(1, len(weights[name]) // num_rows)
            weight, delta = weights[name][::step].double(), (bt.double().t() @ a.double())[::step]
            lost += float(((weight + delta).to(weights[name].dtype).double() - weight - delta).square().sum())
            total += float(delta.square().sum())
    return 1 - (lost / total) ** 0.5


class FakeStream:
    """A stream on the CPU. A pinned buffer must not be written before a copy from it is known to be done."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_current = False
        self._num_copies = 0
        self._running: list[tuple[torch.Tensor, bytes]] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.log.append("pinned")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark_caller(self) -> str:
        return "caller"

    def wait(self, mark: str) -> None:
        self.log.append(f"wait for {mark}")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.check()
        target.copy_(source)
        self.log.append("copy")
        self._running.append((source, source.numpy().tobytes()))
        self._num_copies += 1
        return SimpleNamespace(synchronize=functools.partial(self._finish, self._num_copies))

    def _finish(self, number: int) -> None:
        """Copies are done in order: this one and all before it."""
        self.check()
        self._running = self._running[len(self._running) - (self._num_copies - number) :]

    def check(self) -> None:
        for source, content in self._running:
            assert source.numpy().tobytes() == content, "a buffer was written while it was copied"

    def synchronize(self) -> None:
        raise AssertionError("waits for everything on the stream")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False


class Launches(TorchDispatchMode):
    """Records the operators that are no views, and whether the stream was current."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.names: list[str] = []
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in ("empty", "_unsafe_view"):
            self.names.append(func.overloadpacket.__name__)
            assert self._stream.is_current, f"{func} outside of the stream"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("on_device", [False, True])
def test_fidelity_is_that_of_the_definition(dtype: torch.dtype, size: float, on_device: bool) -> None:
    slabs = make_slabs(dtype=dtype)
    factors = make_factors(slabs, size, ranks=(8, 3, 16))
    factors["model.visual.blocks.0.attn.qkv"] = HostFactors(
        torch.ones(8, 4, dtype=dtype), torch.ones(8, 4, dtype=dtype)
    )
    stream = FakeStream() if on_device else None
    found = MergeFidelity(slabs, stream=stream)(factors)  # type: ignore[arg-type]
    wanted = expected({name: slabs.entry(name) for name in slabs.slots}, factors)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert 0 < wanted < 0.9999


@pytest.mark.parametrize("factors", [{}, {"model.visual.merger": HostFactors(torch.ones(1, 4), torch.ones(1, 4))}])
def test_an_adapter_without_language_layers_loses_nothing(factors: dict[str, HostFactors]) -> None:
    stream = FakeStream()
    assert MergeFidelity(make_slabs(), stream=stream)(factors) == 1.0  # type: ignore[arg-type]
    assert "copy" not in stream.log


def test_slabs_that_are_overwritten_are_not_read() -> None:
    slabs = make_slabs()
    factors = make_factors(slabs, 0.1)
    measure = MergeFidelity(slabs, CopiedBaseWeights(slabs))
    before = measure(factors)
    for slab in slabs.base:
        slab.fill_(torch.nan)
    assert measure(factors) == before


@pytest.mark.parametrize("num_layers", [2, 7])
def test_the_number_of_launches_does_not_grow_with_the_layers(num_layers: int) -> None:
    slabs = make_slabs(num_layers)
    factors = make_factors(slabs)
    stream = FakeStream()
    measure = MergeFidelity(slabs, stream=stream)  # type: ignore[arg-type]
    assert stream.log.pop() == "wait for caller", "the slabs were written on the caller's stream"
    with Launches(stream) as launches:
        measure(factors)
    assert stream.log.count("copy") == len(SHAPES) + 1, "one upload per batch, one copy of the result"
    assert len(launches.names) <= MOST_LAUNCHES * len(SHAPES) + 5, "and joining the norms of the batches"
    waiting = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}
    assert not waiting.intersection(launches.names)


def test_batches_fit_into_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer is written while the other is copied, also if a single layer needs a larger one."""
    monkeypatch.setattr(module, "SLOT_BYTES", 4096)
    slabs = make_slabs(6)
    factors = make_factors(slabs, 0.1, ranks=(2, 2, 2, 2, 2, 2, 64))
    stream = FakeStream()
    found = MergeFidelity(slabs, stream=stream)(factors)  # type: ignore[arg-type]
    assert found == pytest.approx(expected({name: slabs.entry(name) for name in slabs.slots}, factors), abs=1e-5)
    assert stream.log.count("copy") > 6 and stream.log.count("pinned") > 3


def test_a_buffer_that_is_written_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the fake stream."""
    monkeypatch.setattr(module, "SLOT_BYTES", 4096)
    slabs = make_slabs(6)
    measure = MergeFidelity(slabs, stream=_Unfinished())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="written while it was copied"):
        measure(make_factors(slabs, ranks=(2,)))


class _Unfinished(FakeStream):
    """Waiting for a copy does not finish it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        super().copy(target, source)
        return SimpleNamespace(synchronize=lambda: None)


def test_two_threads_measure_one_after_the_other() -> None:
    slabs = make_slabs(6)
    measure = MergeFidelity(slabs, stream=FakeStream())  # type: ignore[arg-type]
    sizes = (1.0, 0.1, 0.01, 0.3) * 4
    wanted = [measure(make_factors(slabs, size)) for size in sizes]
    found: dict[int, float] = {}

    def work(first: int) -> None:
        for index in range(first, len(sizes), 2):
            found[index] = measure(make_factors(slabs, sizes[index]))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(sizes))] == wanted
