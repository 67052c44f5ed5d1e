"""Adapters built from factors, as if they were read from a folder."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vlora.lora.host_adapter import HostAdapter
from vlora.lora.layout import FactorShape, HostFactors, carve, run_bytes


def factors_of(adapter: HostAdapter) -> dict[str, HostFactors]:
    """The adapter's factors by layer."""
    return carve(adapter.run, adapter.shapes, adapter.dtype)


def host_adapter(key: str, given: Mapping[str, HostFactors]) -> HostAdapter:
    """An adapter with the given factors by layer, in the order in which factors are laid out."""
    dtype = next(iter(given.values())).a.dtype
    shapes = {name: FactorShape(len(a), a.shape[1], bt.shape[1]) for name, (a, bt) in given.items()}
    run = torch.zeros(run_bytes(shapes, dtype), dtype=torch.uint8)
    factors = carve(run, shapes, dtype)
    for name, pair in given.items():
        for to, tensor in zip(factors[name], pair, strict=True):
            to.copy_(tensor)
    return adapter_of_run(key, "", run, shapes, dtype)


def adapter_of_run(
    key: str, version: str, run: torch.Tensor, shapes: Mapping[str, FactorShape], dtype: torch.dtype
) -> HostAdapter:
    """An adapter with the given memory of its factors."""
    return HostAdapter(
        key=key,
        version=version,
        run=run,
        dtype=dtype,
        shapes=shapes,
        heads={},
        rank=max(shape.rank for shape in shapes.values()),
        touches_vision=False,
        merge_fidelity=1.0,
    )
