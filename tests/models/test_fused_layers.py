"""Selection of the MLPs, attentions and norms that use one kernel per operation; `check_engine` runs them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import atmm
from tests.families import FAMILIES, build_model
from vlora.models.fused_layers import fuse_gates, fuse_norms, fuse_rotations


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_use_the_kernels(family: str) -> None:
    text_model = build_model(family).model.language_model
    plain = copy.deepcopy(text_model)
    assert fuse_gates(text_model) == fuse_rotations(text_model) == len(text_model.layers) > 0
    for layer in text_model.layers:
        assert type(layer.mlp).__name__.startswith("Fused") and type(layer.self_attn).__name__.startswith("Rotating")
    assert fuse_gates(text_model) == fuse_rotations(text_model) == 0, "layers are changed once"
    x = torch.randn(1, 5, text_model.config.hidden_size)
    with torch.inference_mode():  # gates by the model's own code, as a CPU has no kernel for them
        assert torch.equal(text_model(inputs_embeds=x)[0], plain(inputs_embeds=x)[0])
    assert text_model.state_dict().keys() == plain.state_dict().keys()


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


@pytest.mark.skipif(not atmm.serves_norm(torch.device("cpu"), torch.float32), reason="no C++ compiler here")
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_every_family_use_the_kernel(family: str) -> None:
    model = build_model(family)
    norms = [module for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    assert fuse_norms(model) == len(norms) > 0
    x = torch.randn(2, 3, norms[0].weight.numel())
    fused = norms[0](x)  # gradients are on: the model's own code
    with torch.inference_mode():
        torch.testing.assert_close(norms[0](x), fused.detach(), rtol=1e-6, atol=1e-6)
    names = set(dict(model.named_parameters()))
    assert names == set(dict(build_model(family).named_parameters()))
