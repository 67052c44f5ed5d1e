"""Ranks detect that they hold different weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlora.models.sharding import fingerprint


class Model(nn.Module):
    """A matrix of 131,072 values, a vector, and buffers with one value and none."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter((torch.arange(131_072.0) % 251).view(1024, 128))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("number", torch.tensor(2.0))


@pytest.mark.parametrize("part", [0, 1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_a_difference_in_an_eighth_of_a_tensor_is_detected(side: str, part: int) -> None:
    """At any place, as if the file of a shard were of another version."""
    other = Model()
    with torch.no_grad():
        (other.matrix if side == "rows" else other.matrix.t()).chunk(8)[part].add_(1)
    assert fingerprint(other) != fingerprint(Model())


def test_a_vector_is_read_whole() -> None:
    for place in range(3):
        other = Model()
        with torch.no_grad():
            other.vector[place] += 1
        assert fingerprint(other) != fingerprint(Model())


def test_fingerprints_depend_on_weights_dtypes_and_shapes() -> None:
    assert fingerprint(Model()) == fingerprint(Model())
    assert fingerprint(Model().to(torch.bfloat16)) != fingerprint(Model())
    reshaped = Model()
    reshaped.number = torch.tensor([2.0])
    assert fingerprint(reshaped) != fingerprint(Model())
