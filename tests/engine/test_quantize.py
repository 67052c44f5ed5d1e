"""The quantize setting: its errors, the memory of quantized weights, and the adapters that are merged on them."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atmm import formats
from atmm.quantized import QuantizedWeight
from tests.families import build_model
from tests.lora.test_merge_fidelity import make_factors
from tests.oracle import Oracle
from vlora.config import EngineConfig, Quantize
from vlora.engine import LocalEngine, device_runtime
from vlora.engine.device_runtime import lay_out
from vlora.engine.quantize import FORMATS, check_device, format_of
from vlora.errors import BadConfig
from vlora.lora.host_adapter import HostAdapter
from vlora.lora.merge_fidelity import MergeFidelity
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import Inline
from vlora.models.hf_model import HFModel
from vlora.models.loading import load_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLAIN = SimpleNamespace(config=None)  # a model that is not stored quantized
CONFIG = EngineConfig(model="tiny", quantize="fp8", arena_bytes=256 * PAGE_BYTES)


@pytest.fixture(scope="module")
def slabs() -> WeightSlabs:
    hf_model = HFModel(build_model("qwen2_vl", torch.bfloat16))
    return lay_out(CONFIG, hf_model, None, loaded=False).slabs


@pytest.fixture
def local() -> LocalEngine:
    config = EngineConfig(model="tiny", quantize="fp8", arena_bytes=1024 * PAGE_BYTES)
    return LocalEngine(config, model=build_model("qwen2_vl"), executor=Inline())


def adapters(local: LocalEngine, folder: Path, scale: float, *names: str) -> list[HostAdapter]:
    """Adapters of the oracle with factors of this size, read from `folder`."""
    folders = Oracle("qwen2_vl", build_model("qwen2_vl"), scale).save(folder)
    found = [local.engine.parts.registry.read_folder(name, folders[name]).adapter for name in names]
    return [adapter for adapter in found if adapter is not None]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantize": "int3"}, "quantize is 'int3'; choose one of none, fp8, int8, int4"),
        ({"quantize_head": True}, "quantize_head needs a format; set quantize too"),
        ({"quantize": "fp8", "switching": "in_place"}, "in_place is not possible with quantize fp8.*choose switching"),
    ],
)
def test_bad_values(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        EngineConfig(model="m", **settings)


def test_a_gpu_without_eight_bit_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(BadConfig, match=r"needs a GPU of compute capability 8\.9 or higher; NVIDIA A100 has 8\.0; set"):
        check_device(CONFIG, GPU)


@pytest.mark.parametrize(
    ("quantize", "device", "linear", "words"),
    [
        ("fp8", GPU, {}, "needs dtype bfloat16; the weights are torch.float32"),
        ("fp8", GPU, {"dtype": torch.float16}, "needs dtype bfloat16; the weights are torch.float16"),
        ("fp8", GPU, {"in_features": 24, "dtype": torch.bfloat16}, "multiples of 16; q_proj has 16 x 24; set quantize"),
        ("int4", GPU, {"in_features": 48}, "needs layers with inputs in multiples of 32; q_proj has 48; set quantize"),
        ("int4", CPU, {"in_features": 48}, "needs layers with inputs in multiples of 32; q_proj has 48; set quantize"),
    ],
)
def test_layers_that_a_device_cannot_multiply_are_refused(
    quantize: Quantize, device: torch.device, linear: dict[str, Any], words: str
) -> None:
    layer = torch.nn.Linear(**{"in_features": 32, "out_features": 16, **linear})
    hf_model: Any = SimpleNamespace(language_linears={"q_proj": layer}, model=PLAIN)
    config = EngineConfig(model="tiny", quantize=quantize)
    with pytest.raises(BadConfig, match=words):
        format_of(config, device, hf_model)


@pytest.mark.parametrize(
    ("quantize", "fast"), [("fp8", True), *((q, f) for q in ("int8", "int4") for f in (True, False))]
)
def test_a_cpu_warns_of_slow_products(
    fast: bool, quantize: Quantize, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of eight-bit floats, and of integers without the kernel."""
    monkeypatch.setattr("atmm.formats.multiplies_int8", lambda: fast)
    config = EngineConfig(model="tiny", quantize=quantize)
    with caplog.at_level(logging.WARNING):
        check_device(config, CPU)
    assert ("slower than quantize none" in caplog.text) == (quantize == "fp8" or not fast)
    assert format_of(config, CPU, HFModel(build_model("llava"))) is FORMATS[quantize]


def test_the_language_models_linear_weights_alone_take_half(slabs: WeightSlabs) -> None:
    plain = WeightSlabs(HFModel(build_model("qwen2_vl", torch.bfloat16)).language_linears)
    num_scales = sum(slab.shape[0] * slab.shape[1] for slab in slabs.base)
    assert slabs.num_bytes <= 0.52 * plain.num_bytes + 4 * num_scales
    assert all(isinstance(slabs.entry(name), QuantizedWeight) for name in slabs.slots)
    model = build_model("qwen2_vl", torch.bfloat16)
    hf_model = HFModel(model)
    lay_out(CONFIG, hf_model, None, loaded=False)
    quantized = {name for name, weight in model.named_parameters() if weight.dtype is formats.Fp8.value_dtype}
    assert quantized == {f"{name}.weight" for name in hf_model.language_linears}


def test_layers_are_quantized_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's own weight is freed before the next one is quantized."""
    hf_model = HFModel(build_model("qwen2_vl", torch.bfloat16))
    linears = hf_model.language_linears.values()
    left: list[int] = []
    copy = QuantizedWeight.copy_

    def counted(own: QuantizedWeight, source: Any) -> QuantizedWeight:
        left.append(sum(linear.weight.dtype is torch.bfloat16 for linear in linears))
        return copy(own, source)

    monkeypatch.setattr(QuantizedWeight, "copy_", counted)
    lay_out(CONFIG, hf_model, None, loaded=False)
    assert left == list(range(len(linears), 0, -1))


def test_a_model_to_be_quantized_is_loaded_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("qwen2_vl", torch.bfloat16).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), quantize="fp8", arena_bytes=256 * PAGE_BYTES)
    linears = LocalEngine(config).engine.parts.device.slabs.linears
    assert all(linear.quantized is not None for linear in linears.values())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load_model(dataclasses.replace(config, device="cuda")).device.type == "cpu"


def test_weights_and_merged_weights_have_two_addresses(local: LocalEngine, tmp_path: Path) -> None:
    """A captured graph reads W0 or the shadow, whichever adapter is merged."""
    device = local.engine.parts.device
    for adapter in adapters(local, tmp_path, 0.5, "wide8", "narrow4"):
        assert device.pool.load(adapter)

    def addresses() -> list[int]:
        weights: list[Any] = [linear.stored for linear in device.slabs.linears.values()]
        weights += [joined.weight for _, joined, _, _ in device.slabs.groups]
        return [tensor.data_ptr() for weight in weights for tensor in (weight.values, weight.scales)]

    base = addresses()
    with torch.no_grad():
        merged = []
        for key in sorted(device.pool.resident):
            device.switcher.switch(key)
            merged.append(addresses())
        device.switcher.switch(None)
    assert merged[0] == merged[1] and set(base).isdisjoint(merged[0]) and addresses() == base


@pytest.mark.parametrize("size", [1.0, 0.3, 0.1, 0.01])
def test_fidelity_is_that_of_the_format(slabs: WeightSlabs, size: float) -> None:
    restored: Any = SimpleNamespace(order=slabs.order, entry=lambda name: slabs.entry(name).float().bfloat16())
    factors = make_factors(restored, size)
    lost = total = 0.0
    for name, (a, bt) in factors.items():
        entry = slabs.entry(name)
        step = max(1, entry.shape[0] // 64)
        weight, delta = entry.float()[::step].double(), (bt.double().t() @ a.double())[::step]
        lost += float((entry.rounded((weight + delta).float()).double() - weight - delta).square().sum())
        total += float(delta.square().sum())
    assert MergeFidelity(slabs)(factors) == pytest.approx(max(0.0, 1 - (lost / total) ** 0.5), abs=1e-3)


def test_a_small_adapter_is_not_merged(local: LocalEngine, tmp_path: Path) -> None:
    """Its fidelity is below the default floor, so no policy sees it as mergeable."""
    statuses = []
    for scale in (0.05, 0.5):
        folders = Oracle("qwen2_vl", build_model("qwen2_vl"), scale).save(tmp_path / str(scale))
        statuses.append(local.engine.load_adapter(f"scale-{scale}", folders["wide8"]))
    small, large = statuses
    assert small.merge_fidelity < EngineConfig.merge_fidelity_floor < large.merge_fidelity, statuses
    assert not small.mergeable and large.mergeable


def test_without_memory_for_it_the_shadow_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_runtime, "shadow_fits", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        layout = lay_out(CONFIG, HFModel(build_model("qwen2_vl")), None, loaded=False)
    assert layout.base_weights is None and "the weights are quantized" in caplog.text
