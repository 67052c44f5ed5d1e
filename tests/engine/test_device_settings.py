"""Every thread that launches work on a GPU uses the configured one, and the process has the settings that steps need.

The functions of torch.cuda are recorded: these decisions are the same on a machine without a GPU.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import atmm
from tests.families import HIDDEN, build_model
from tests.lora.made_adapters import host_adapter
from tests.lora.test_merge_fidelity import FakeStream, expected, make_factors
from vlora.config import EngineConfig
from vlora.engine import LocalEngine, build, device_runtime
from vlora.engine.device_runtime import DeviceRuntime, lay_out, use_device
from vlora.engine.tensor_parallel import worker
from vlora.lora import merge_in_place
from vlora.lora.merge_fidelity import MergeFidelity
from vlora.lora.peft_format import SiteShape
from vlora.lora.registry import AdapterRegistry
from vlora.memory import host_to_device
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import HostTransfer, Inline, make_transfer
from vlora.memory.page_allocator import PageAllocator
from vlora.models import runner
from vlora.models.gpu.attention import GpuAttention
from vlora.models.hf_model import HFModel
from vlora.threads import background_executor

GPU = torch.device("cuda", 1)
CONFIG = EngineConfig(model="tiny", arena_bytes=64 * PAGE_BYTES)


class _Reached(Exception):
    """Ends a constructor after the part under test."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """The calls of `torch.cuda.set_device`, with the name of the calling thread."""
    calls: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: calls.append((threading.current_thread().name, device))
    )
    return calls


@pytest.fixture(autouse=True)
def cudnn_attention() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("name", "num_chosen"), [("cpu", 0), ("cuda", 0), ("cuda:1", 1)])
def test_an_engine_on_a_gpu_has_no_cudnn_attention(
    chosen: list[tuple[str, torch.device]], name: str, num_chosen: int
) -> None:
    """A GPU without a number is the current one."""
    use_device(torch.device(name))
    assert torch.backends.cuda.cudnn_sdp_enabled() == (name == "cpu")
    assert [device for _, device in chosen] == num_chosen * [GPU]


@pytest.mark.parametrize("patient", [False, True])
def test_a_background_thread_launches_on_its_device(chosen: list[tuple[str, torch.device]], patient: bool) -> None:
    executor = background_executor("reader", patient=patient, device=GPU)
    assert executor.submit(torch.get_num_threads).result() == 1
    executor.shutdown()
    assert chosen == [("reader_0", GPU)]


def test_adapters_are_read_and_copied_on_the_device(
    chosen: list[tuple[str, torch.device]],
    adapters_of_family: Callable[[str], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = FakeStream()
    monkeypatch.setattr(stream, "synchronize", lambda: None)
    monkeypatch.setattr(host_to_device, "SideStream", lambda device: stream)
    folder = adapters_of_family("qwen2_vl")["wide8"]
    linears = HFModel(build_model("qwen2_vl")).language_linears
    sites = {name: SiteShape(linear.in_features, linear.out_features, False) for name, linear in linears.items()}
    registry = AdapterRegistry(sites, torch.float32, HIDDEN, device=GPU)
    registry.register({"wide8": folder})
    registry.fetch(registry.get("wide8").key)
    futures: list[Future[Any]] = [*registry.pending]  # none if it has been read already
    transfer = make_transfer(GPU)
    source, target = (torch.zeros(8, dtype=torch.uint8) for _ in range(2))
    futures += [registry.read_folder_in_background("again", folder), transfer.start(source, target)]
    for future in futures:
        future.result()
    registry.close()
    transfer.close()
    assert sorted(chosen) == [("vlora-copy_0", GPU), ("vlora-load_0", GPU), ("vlora-read_0", GPU)]


@pytest.mark.parametrize("rank", [None, 1])
def test_an_engine_or_a_rank_uses_its_device_before_it_loads_the_model(
    monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    wanted = torch.device("cpu") if rank is None else torch.device("cuda", rank)
    used: list[tuple[int, torch.device]] = []

    def load_model(*_: Any) -> None:
        assert used == [(threading.get_ident(), wanted)]
        raise _Reached

    for module in (build, worker):
        monkeypatch.setattr(module, "use_device", lambda device: used.append((threading.get_ident(), device)))
        monkeypatch.setattr(module, "load_model", load_model)
    monkeypatch.setattr(build, "with_stored_format", lambda config: config)  # there is no such model
    monkeypatch.setattr(worker, "set_threads", lambda config: 1)
    monkeypatch.setattr(worker, "device_of", lambda config, rank: torch.device("cuda", rank))
    start: Any = SimpleNamespace(config=CONFIG, rank=rank)
    reports: Any = None
    with pytest.raises(_Reached):
        LocalEngine(CONFIG) if rank is None else worker.TensorParallelWorker(start, {}, reports)


def test_an_engine_reads_adapters_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def registry(*_: Any, **settings: Any) -> None:
        given.update(settings)
        raise _Reached

    monkeypatch.setattr(build, "AdapterRegistry", registry)
    model = build_model("qwen2_vl")
    with pytest.raises(_Reached):
        LocalEngine(CONFIG, model=model)
    assert given["device"] == model.device and isinstance(given["measure"], MergeFidelity)


def test_the_thread_of_a_local_engine_launches_on_its_device(chosen: list[tuple[str, torch.device]]) -> None:
    local = LocalEngine(CONFIG, model=build_model("qwen2_vl"))
    local.engine.parts.device.hf_model.device = GPU

    async def call() -> None:
        await local.stats()
        await local.close()

    asyncio.run(call())
    assert chosen == [("vlora-engine", GPU)]


def test_unused_memory_of_loaded_weights_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device allocator as torch's: the storage of freed weights stays reserved, which the driver counts as used."""
    hf_model = HFModel(build_model("qwen2_vl"))
    linears = hf_model.language_linears.values()
    free, reserved = 2**26, 2**30

    def empty_cache() -> None:
        nonlocal free, reserved
        weights = [linear.weight for linear in linears]
        if all(weight.untyped_storage().nbytes() > weight.nbytes for weight in weights):  # all are parts of slabs
            free, reserved = free + reserved, 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**31))
    monkeypatch.setattr(device_runtime, "Arena", lambda num_pages, device: None)
    hf_model.device = GPU
    layout = lay_out(EngineConfig(model="tiny", max_batch_size=512), hf_model, None, loaded=False)
    assert layout.base_weights is None, "a shadow fits into the returned memory"
    assert layout.limits.arena_basis == "90% of free memory"
    pages = int(0.9 * (2**26 + 2**30 - layout.slabs.num_bytes)) // PAGE_BYTES
    assert pages - layout.limits.block_pages < layout.limits.num_pages <= pages


@pytest.mark.parametrize("switching", ["shadow", "in_place"])
def test_merging_on_a_gpu_is_prepared_at_start(monkeypatch: pytest.MonkeyPatch, switching: Any) -> None:
    """Kernels are compiled, merged weights get fixed addresses, and fidelity is measured on a stream of its own."""
    compiled: list[frozenset[tuple[int, int]]] = []
    monkeypatch.setattr(atmm, "compile_merges", lambda shapes, dtype, device: compiled.append(frozenset(shapes)))
    streams: list[FakeStream] = []

    def side_stream(device: torch.device) -> FakeStream:
        assert device == GPU
        streams.append(FakeStream())
        return streams[-1]

    monkeypatch.setattr(device_runtime, "SideStream", side_stream)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(runner, "StepTokens", lambda *_: None)  # no step runs
    monkeypatch.setattr(GpuAttention, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(device_runtime, "make_transfer", lambda device, executor: HostTransfer(executor))
    monkeypatch.setattr(merge_in_place, "SAMPLE_ROWS", 8)
    monkeypatch.setattr(merge_in_place, "SAMPLE_VALUES", 1)
    hf_model = HFModel(build_model("qwen2_vl", torch.bfloat16))
    config = EngineConfig(model="tiny", arena_bytes=256 * PAGE_BYTES, switching=switching, cuda_graphs=False)
    layout = lay_out(config, hf_model, None, loaded=False)
    hf_model.device = GPU
    adapter_cache = AdapterCache(PageAllocator(layout.limits.num_pages, 1), layout.limits.num_pages)
    device = DeviceRuntime(config, layout, adapter_cache, executor=Inline())
    (shapes,) = compiled
    factors = make_factors(device.slabs, 0.1)
    expected_fidelity = expected({name: device.slabs.entry(name) for name in device.slabs.slots}, factors)
    assert device.merge_fidelity(factors) == pytest.approx(expected_fidelity, abs=1e-5)
    if switching == "shadow":
        assert shapes == device.slabs.shapes
        (stream,) = streams
        assert "copy" in stream.log
        adapter = host_adapter("a@1", {name: factors[name] for name in list(factors)[:1]})
        assert device.pool.load(adapter)
        before = {linear.weight.data_ptr() for linear in device.slabs.linears.values()}
        with torch.no_grad():
            device.switcher.switch("a@1")
        assert before.isdisjoint(linear.weight.data_ptr() for linear in device.slabs.linears.values())
    else:
        assert shapes > device.slabs.shapes, "the samples of rows are merged too"
        assert not streams, "W0 is in host memory"


def test_a_cpu_compiles_no_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atmm, "compile_merges", lambda *_: pytest.fail("there is no GPU"))
    LocalEngine(CONFIG, model=build_model("qwen2_vl"))
