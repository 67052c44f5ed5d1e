"""Selection of the norms that the compiled kernel replaces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import atmm
from tests.families import FAMILIES, build_model
from vlora.models.rms_norm import fuse_norms

pytestmark = pytest.mark.skipif(not atmm.serves_norm(torch.device("cpu"), torch.float32), reason="no C++ compiler here")


class OffsetRMSNorm(nn.Module):
    """A different formula under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


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


def test_norms_with_another_formula_are_not_replaced() -> None:
    model = nn.Sequential(OffsetRMSNorm())
    assert fuse_norms(model) == 0 and type(model[0]) is OffsetRMSNorm
