"""Ranks notice that they hold different weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlora.models.sharding import fingerprint


class Model(nn.Module):
    """A matrix of 64,000 values, a vector, and buffers with one value and none."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter((torch.arange(64_000.0) % 251).view(1000, 64))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("number", torch.tensor(2.0))


@pytest.mark.parametrize("rows", [slice(0, 100), slice(450, 550), slice(900, 1000)])
def test_a_part_of_a_tensor_that_differs_shows(rows: slice) -> None:
    """As where a shard is of another version, at its beginning or its end."""
    other = Model()
    with torch.no_grad():
        other.matrix[rows] += 1
    assert fingerprint(other) != fingerprint(Model())


def test_equal_weights_have_one_fingerprint_and_other_dtypes_or_shapes_another() -> None:
    assert fingerprint(Model()) == fingerprint(Model())
    assert fingerprint(Model().to(torch.bfloat16)) != fingerprint(Model())
    reshaped = Model()
    reshaped.number = torch.tensor([2.0])
    assert fingerprint(reshaped) != fingerprint(Model())
