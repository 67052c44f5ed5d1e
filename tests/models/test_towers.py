"""Vision towers in pieces, with torch's flash kernel, and without convolutions; layers with one kernel per operation:
each gives the results of the published code.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import atmm
from atmm import flash_attention
from atmm.cpu import attention
from tests.atmm.flash_oracle import VERSIONS
from tests.example_counts import scaled
from tests.families import FAMILIES, VIDEO_FAMILIES, build_model, make_prompt
from vlora.models import hf_model as hf_model_module
from vlora.models.families import encode_patches, patch_flops
from vlora.models.fused_layers import convert_patch_embeddings, fuse_gates, fuse_norms, fuse_rotations
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.processing import to_tensor
from vlora.models.vision import stepwise_tower
from vlora.models.vision.stepwise_tower import PacedCall
from vlora.types import VisionInput

Fields = list[dict[str, torch.Tensor]]
EVERY = pytest.mark.parametrize(
    ("family", "kind"), [(f, "image") for f in FAMILIES] + [(f, "video") for f in VIDEO_FAMILIES]
)


def items_of(family: str, model: Any, kind: str = "image", count: int = 2) -> tuple[VisionInput, ...]:
    images, videos = (count, 0) if kind == "image" else (0, 1 if family == "llava_onevision" else 2)
    return make_prompt(family, model, 0, num_images=images, num_videos=videos).vision


def fields_of(items: tuple[VisionInput, ...]) -> Fields:
    return [{name: to_tensor(value) for name, value in item.fields.items()} for item in items]


def encode(hf_model: HFModel, kind: str, fields: Fields, lanes: list[atmm.Lane]) -> list[VisionFeatures]:
    units = sum(hf_model.num_units(kind, item) for item in fields)
    with hf_model.vision_scope.lanes(units, lanes):
        return hf_model.encode(kind, fields)


def assert_as_published(published: Any, model: HFModel, kind: str, fields: Fields) -> None:
    """Compare one call for all items with a call of the published code for each."""
    with torch.inference_mode():
        together = model.encode(kind, fields)
    encode_published = published.model.get_image_features if kind == "image" else published.model.get_video_features
    pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
    for own, found in zip(fields, together, strict=True):
        others = ("image_grid_thw", "image_sizes", "batch_num_images", "video_grid_thw")
        named = {name: own[name] for name in others if name in own}
        with torch.inference_mode():
            parts = encode_published(own[pixels], **named, return_dict=True).pooler_output
            wanted = torch.cat([part.reshape(-1, 64) for part in parts])
        torch.testing.assert_close(found.rows[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)


# -- in pieces --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepwise_tower, "CPU_PIECE_FLOPS", 2e4)
    monkeypatch.setattr(stepwise_tower, "MIN_ROWS", 8)
    monkeypatch.setattr(stepwise_tower, "MIN_QUERIES", 4)


def in_steps(call: PacedCall[list[VisionFeatures]], flops: float) -> int:
    """Run a call to its end. Returns the number of steps."""
    for number in range(1, 100_000):
        with torch.inference_mode():
            if call.advance(flops):
                return number
    raise AssertionError("the call does not finish")


def assert_equal(found: list[VisionFeatures], wanted: list[VisionFeatures]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.rows, other.rows)
        assert len(one.deepstack) == len(other.deepstack)
        assert all(map(torch.equal, one.deepstack, other.deepstack))


@EVERY
def test_in_steps_and_at_once_are_bit_equal(family: str, kind: str, small_pieces: None) -> None:
    model = build_model(family)
    hf_model, fields = HFModel(model), fields_of(items_of(family, model, kind))
    with torch.inference_mode():
        whole = encode(hf_model, kind, fields, [])
    call = PacedCall(lambda: encode(hf_model, kind, fields, []))
    assert in_steps(call, 1e5) > 5
    assert_equal(call.result, whole)


def test_other_lanes_between_two_steps_change_nothing(small_pieces: None) -> None:
    model = build_model("qwen2_vl")
    hf_model, fields = HFModel(model), fields_of(items_of("qwen2_vl", model))
    lanes = []
    for key in ("a", "b"):
        for layer in hf_model.vision_linears.values():
            down, up = torch.randn(4, layer.in_features), torch.randn(4, layer.out_features)
            layer.site.factors[key] = atmm.Factors(down, up)
        units = sum(hf_model.num_units("image", item) for item in fields)
        lanes.append([atmm.Lane(key, 0, units, 1.0)])
    with torch.inference_mode():
        first, second = (encode(hf_model, "image", fields, each) for each in lanes)
    assert not torch.equal(first[0].rows, second[0].rows)
    call = PacedCall(lambda: encode(hf_model, "image", fields, lanes[0]))
    done = False
    while not done:
        with torch.inference_mode():
            done = call.advance(5e5)
            with hf_model.vision_scope.suspended():
                assert_equal(encode(hf_model, "image", fields, lanes[1]), second)
    assert_equal(call.result, first)


def test_an_abandoned_call_exits_its_lanes(small_pieces: None) -> None:
    model = build_model("llava")
    hf_model, fields = HFModel(model), fields_of(items_of("llava", model))
    call = PacedCall(lambda: encode(hf_model, "image", fields, [atmm.Lane("gone", 0, 2, 1.0)]))
    with torch.inference_mode():
        assert not call.advance(1e4)
    assert hf_model.vision_scope.plan_for(2) is not None
    call.close()
    assert hf_model.vision_scope.plan_for(2) is None


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_patch_counts_match_the_operations_spent(family: str, count: int) -> None:
    model = build_model(family)
    items, hf_model = items_of(family, model, count=count), HFModel(model)
    call = PacedCall(lambda: encode(hf_model, "image", fields_of(items), []))
    in_steps(call, 1e15)
    expected = sum(encode_patches(model.config, item) for item in items)
    # Class tokens and tiles that only pad a batch are not counted.
    assert call.flops / patch_flops(model.config) == pytest.approx(expected, rel=0.25)


@pytest.fixture(params=[True, False], ids=["greenlet", "whole"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, also as in an installation without greenlet."""
    if request.param:
        return stepwise_tower
    monkeypatch.setitem(sys.modules, "greenlet", None)
    spec = importlib.util.find_spec("vlora.models.vision.stepwise_tower")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_call_runs_to_its_end_or_raises_its_error_once(module: ModuleType) -> None:
    """Without greenlet whole, in its first step."""
    spent: list[float] = []

    def call(*, fails: bool) -> str:
        for flops in (1e9, 2e9):
            module.spend(flops)
            spent.append(flops)
        if fails:
            raise ValueError("broken picture")
        return "features"

    paced, whole = module.PacedCall(lambda: call(fails=False)), module is not stepwise_tower
    assert paced.advance(1.0) == whole and (not whole or spent == [1e9, 2e9])
    while not paced.advance(1.0):
        pass
    assert paced.result == "features" and spent == [1e9, 2e9]
    paced.close()
    paced = module.PacedCall(lambda: call(fails=True))
    with pytest.raises(ValueError, match="broken picture"):
        while not paced.advance(1.0):
            pass
    assert paced.advance(1.0)


# -- the flash kernel -------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of the kernel, whose CPU implementation replaces it, and of the attention, on a CPU that passes for a
    GPU.
    """
    counted: Counter[str] = Counter()
    flash, attend = VERSIONS["2.13"], stepwise_tower.flash_attention

    def counted_flash(*given: Any, **named: Any) -> torch.Tensor:
        counted["kernel"] += 1
        return flash(*given, **named)

    def counted_attention(*given: Any, **named: Any) -> Any:
        counted["attention"] += 1
        return attend(*given, **named)

    monkeypatch.setattr(flash_attention, "kernel", lambda: counted_flash)
    monkeypatch.setattr(stepwise_tower, "flash_attention", counted_attention)
    register, gpu = stepwise_tower.register_vision_attention, torch.device("cuda")
    monkeypatch.setattr(hf_model_module, "register_vision_attention", lambda device: register(gpu))
    return counted


@pytest.mark.parametrize("serves", (True, False), ids=("kernel", "plain"))
@EVERY
def test_flash_towers_give_what_the_published_code_gives(
    family: str, kind: str, serves: bool, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call serves all images, and advances in pieces that count its work."""
    monkeypatch.setattr(atmm, "serves_flash", lambda device, dtype, head_dim: serves)
    published, model = build_model(family), HFModel(build_model(family))
    items = items_of(family, published, kind, 3)
    fields = fields_of(items)
    assert_as_published(published, model, kind, fields)
    assert calls["attention"] > 0 and calls["kernel"] == (calls["attention"] if serves else 0)
    if model.family.mrope:
        assert calls["attention"] == len(published.model.visual.blocks)
    call = PacedCall(lambda: model.encode(kind, fields[:1]))
    assert in_steps(call, 1e4) > 3
    if kind == "image":
        patches = encode_patches(model.config, items[0])
        assert call.flops / patch_flops(model.config) == pytest.approx(patches, rel=0.25)


@EVERY
def test_towers_on_a_cpu_give_what_the_published_code_gives(
    family: str, kind: str, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: Counter[str] = Counter()

    def counted(name: str) -> Any:
        kernel = getattr(atmm, name)

        def call(*given: Any, **named: Any) -> Any:
            result = kernel(*given, **named)
            called[name] += result is not False
            return result

        return call

    published, model = build_model(family), HFModel(build_model(family))
    for name in ("attend_all", "try_to_rotate", "gelu", "gate_product"):
        monkeypatch.setattr(atmm, name, counted(name))
    monkeypatch.setattr(attention, "flags", lambda: {"avx512f"})
    assert_as_published(published, model, kind, fields_of(items_of(family, published, kind, 3)))
    kernels = {"attend_all"} | ({"try_to_rotate"} if model.family.mrope else set())
    kernels |= {"qwen_vl": set(), "qwen2_5_vl": {"gate_product"}}.get(family, {"gelu"})
    assert called.keys() == (kernels if atmm.serves_pointwise(torch.device("cpu"), torch.float32) else set())


def test_the_attention_follows_the_model_to_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(build_model("qwen2_vl"))

    def moved(device: torch.device) -> None:
        monkeypatch.setattr(model, "embed", SimpleNamespace(weight=SimpleNamespace(device=device)))

    monkeypatch.setattr(model.model, "to", moved)
    for device, wanted in (("cpu", "VISION_ATTENTION"), ("cuda", "VISION_FLASH"), ("cpu", "VISION_ATTENTION")):
        model.move(torch.device(device))
        assert model.inner.visual.config._attn_implementation == getattr(stepwise_tower, wanted)  # noqa: SLF001


# -- patch embeddings -------------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[int, type[nn.Conv2d] | type[nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}


class Convolutions(TorchDispatchMode):
    """Counts the calls of convolutions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "conv" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def test_towers_have_no_convolution() -> None:
    """The published one has, which is the control of the counting."""
    for family in FAMILIES:
        model = build_model(family)
        fields = fields_of(items_of(family, model))
        (conv,) = (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d))
        before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        with torch.inference_mode(), Convolutions() as published:
            conv(torch.zeros(1, conv.in_channels, *(3 * width for width in conv.kernel_size)))
        hf_model = HFModel(model)
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()}.keys() == before.keys()
        assert conv.weight.data_ptr() in before.values()
        with torch.inference_mode(), Convolutions() as converted:
            hf_model.encode("image", fields)
        assert converted.count == 0 < published.count


@settings(max_examples=scaled(100))
@given(data=st.data(), dims=st.sampled_from([2, 3]))
def test_patches_of_any_size_and_layout_are_those_of_the_convolution(data: st.DataObject, dims: int) -> None:
    kernel = tuple(data.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims)))
    sizes = [data.draw(st.integers(width, 3 * width + 1)) for width in kernel]
    channels, d_out = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    bias, dtype = data.draw(st.booleans()), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    conv = CONVOLUTIONS[dims](channels, d_out, kernel, kernel, bias=bias)  # type: ignore[arg-type]
    x = torch.randn(data.draw(st.integers(1, 3)), channels, *sizes)
    if data.draw(st.booleans()):
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    wanted = conv(x)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), conv.weight)
    assert convert_patch_embeddings(nn.Sequential(conv)) == 1
    (found_gradient,) = torch.autograd.grad(conv(x).square().sum(), conv.weight)  # training uses the same model
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        found = conv.to(dtype)(x.to(dtype))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    assert found.dtype is dtype and found.shape == wanted.shape
    assert torch.allclose(found.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 8, 4, 2),
        nn.Conv2d(3, 8, 4, 4, padding=1),
        nn.Conv2d(3, 8, 3, 3, dilation=2),
        nn.Conv2d(4, 8, 4, 4, groups=2),
        nn.Conv3d(3, 8, (2, 4, 4), (1, 4, 4)),
        nn.Conv1d(3, 8, 4, 4),
        nn.ConvTranspose2d(3, 8, 4, 4),
        nn.Conv2d(3, 8, 4, 4).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    ],
    ids=str,
)
def test_other_convolutions_stay(conv: nn.Module) -> None:
    kind = type(conv)
    assert convert_patch_embeddings(nn.Sequential(conv)) == 0
    assert type(conv) is kind


# -- one kernel per operation (`check_engine` runs them) --------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_use_the_kernels(family: str) -> None:
    model = build_model(family)
    text_model, plain = model.model.language_model, copy.deepcopy(model)
    assert fuse_gates(text_model) == fuse_rotations(text_model) == len(text_model.layers) > 0
    for layer in text_model.layers:
        assert type(layer.mlp).__name__.startswith("Fused") and type(layer.self_attn).__name__.startswith("Rotating")
    assert fuse_gates(text_model) == fuse_rotations(text_model) == 0, "layers are changed once"
    x = torch.randn(1, 5, text_model.config.hidden_size)
    with torch.inference_mode():
        wanted = plain.model.language_model(inputs_embeds=x)[0]
        torch.testing.assert_close(text_model(inputs_embeds=x)[0], wanted, rtol=1e-5, atol=1e-5)
    if atmm.serves_pointwise(torch.device("cpu"), torch.float32):
        norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        assert fuse_norms(model) == len(norms) > 0
        x = torch.randn(2, 3, norms[0].weight.numel())
        wanted = norms[0](x).detach()  # gradients are on: the model's own code
        with torch.inference_mode():
            torch.testing.assert_close(norms[0](x), wanted, rtol=1e-6, atol=1e-6)
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_are_fused(family: str) -> None:
    """Their answers are compared wherever an engine runs on a CPU."""
    for dtype in (torch.float32, torch.bfloat16):
        fused = HFModel(build_model(family, dtype)).fused_layers
        assert (fused is not None) is atmm.serves_pointwise(torch.device("cpu"), dtype)


def test_layers_of_another_formula_are_not_fused() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model("qwen2_vl", dtype)
        kind = type(model.model.language_model.layers[0])

        def forward(self: Any, *given: Any, kind: Any = kind, **named: Any) -> torch.Tensor:
            return 1.01 * kind.forward(self, *given, **named)

        for layer in model.model.language_model.layers:
            layer.__class__ = type("Scaled", (kind,), {"forward": forward})
        assert HFModel(model).fused_layers is None


class ReluMLP(nn.Module):
    """Another formula with the same projections."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


def apply_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
    """Another rotation under the same name: pairs of neighbours."""
    turned = torch.stack([-q[..., 1::2], q[..., ::2]], -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None], k


class OtherAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
        return apply_rotary_pos_emb(q, k, cos, sin)


class OffsetRMSNorm(nn.Module):
    """A different formula under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


def test_layers_with_another_formula_are_not_changed() -> None:
    model = nn.Sequential(ReluMLP(), OtherAttention(), OffsetRMSNorm())
    assert fuse_gates(model) == fuse_rotations(model) == fuse_norms(model) == 0
    assert [type(module) for module in model] == [ReluMLP, OtherAttention, OffsetRMSNorm]
