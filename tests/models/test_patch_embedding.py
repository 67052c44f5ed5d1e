"""Patch embeddings by a linear product equal the convolutions of the published code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.example_counts import scaled
from tests.families import FAMILIES, VIDEO_FAMILIES, build_model, make_prompt
from vlora.models.fused_layers import convert_patch_embeddings
from vlora.models.hf_model import HFModel
from vlora.models.processing import to_tensor

CONVOLUTIONS: dict[int, type[nn.Conv2d] | type[nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}


class Convolutions(TorchDispatchMode):
    """Counts the calls of convolutions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "conv" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def patch_embedding(model: nn.Module) -> nn.Conv2d | nn.Conv3d:
    (found,) = (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d))
    return found


def convolved(conv: nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    """The published forward of a converted module."""
    published: Any = CONVOLUTIONS[len(conv.kernel_size)]
    return published.forward(conv, x)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_towers_embed_the_patches_of_their_inputs_without_a_convolution(family: str, kind: str) -> None:
    if kind == "video" and family not in VIDEO_FAMILIES:
        pytest.skip("the family does not accept videos")
    model = build_model(family)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    hf_model = HFModel(model)
    conv = patch_embedding(model)
    weight = next(name for name, parameter in model.named_parameters() if parameter is conv.weight)
    assert conv.weight.data_ptr() == before[weight] and before.keys() == dict(model.named_parameters()).keys()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    conv.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    images, videos = (2, 0) if kind == "image" else (0, 1)
    items = make_prompt(family, model, 0, num_images=images, num_videos=videos).vision
    with torch.inference_mode(), Convolutions() as counted:
        for item in items:
            hf_model.encode(kind, [{name: to_tensor(value) for name, value in item.fields.items()}])
    assert seen and counted.count == 0
    for x, found in seen:
        with torch.inference_mode():
            wanted = convolved(conv, x)
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_the_published_towers_have_convolutions() -> None:
    """Negative control: the mode counts them."""
    model = build_model("llava")
    conv = patch_embedding(model)
    with torch.inference_mode(), Convolutions() as counted:
        conv(torch.zeros(1, 3, 16, 16))
    assert counted.count > 0


@settings(max_examples=scaled(100))
@given(data=st.data(), dims=st.sampled_from([2, 3]))
def test_any_sizes_and_layouts(data: st.DataObject, dims: int) -> None:
    kernel = tuple(data.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims)))
    sizes = [data.draw(st.integers(width, 3 * width + 1)) for width in kernel]
    channels, d_out = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    bias, dtype = data.draw(st.booleans()), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    conv = CONVOLUTIONS[dims](channels, d_out, kernel, kernel, bias=bias).requires_grad_(False)  # type: ignore[arg-type]
    x = torch.randn(data.draw(st.integers(1, 3)), channels, *sizes)
    if data.draw(st.booleans()):
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    wanted = convolved(conv, x)
    assert convert_patch_embeddings(nn.Sequential(conv)) == 1
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


def test_gradients_flow_to_the_weights() -> None:
    """Training uses the same model."""
    conv = nn.Conv2d(3, 8, 4, 4)
    x = torch.randn(2, 3, 8, 9)
    (wanted,) = torch.autograd.grad(conv(x).square().sum(), conv.weight)
    convert_patch_embeddings(nn.Sequential(conv))
    (found,) = torch.autograd.grad(conv(x).square().sum(), conv.weight)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
