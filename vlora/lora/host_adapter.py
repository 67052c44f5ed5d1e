"""An adapter in host memory: tensors read, checked, and converted to the engine's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from safetensors import SafetensorError, safe_open

from heads import TaskHead
from vlora.adapter_files import WEIGHTS_FILE, private_copy
from vlora.errors import BadAdapter
from vlora.lora.layer_reading import BaseLayers, can_be_undone, check_finite, read_layer
from vlora.lora.layout import HostFactors, carve
from vlora.lora.peft_format import AdapterHeader, registered_content
from vlora.parallel.adapter_sharding import FactorShape, dense

_ROWS = torch.contiguous_format

Measure = Callable[[Mapping[str, HostFactors]], float]
"""Merge fidelity of an adapter's dense or rescaled factors: the share that survives merging; 1.0 is lossless."""


@dataclasses.dataclass(frozen=True, eq=False)
class HostAdapter:
    """The content of one registration.

    key: the key of all caches and tables on the device, which is never the name alone. version: hash of the folder's
    content. run: all factors as bytes in the layout of the arena, with values of `dtype`; `carve` gives views of it.
    Views are not kept: for thousands of adapters they are a million objects, which garbage collection would traverse
    between two steps. merged: unsplit factors by layer, for merging factors that are split over ranks. can_merge: False
    if mixed mode could not undo the merged adapter exactly, whatever its merge fidelity.
    """

    key: str
    version: str
    run: torch.Tensor
    dtype: torch.dtype
    shapes: Mapping[str, FactorShape]
    heads: Mapping[str, TaskHead]
    rank: int
    touches_vision: bool
    merge_fidelity: float
    merged: Mapping[str, HostFactors] = dataclasses.field(default_factory=dict)
    can_merge: bool = True


def load_adapter(
    key: str, header: AdapterHeader, dtype: torch.dtype, measure: Measure, base_layers: BaseLayers | None = None
) -> HostAdapter:
    """Read an adapter's tensors: fold the scaling in float32, cast to the model's dtype, check for finite values.

    Raises:
        BadAdapter: A value is not finite, or the files differ from those of the header, or from its version.
    """
    file = header.path / WEIGHTS_FILE
    run = torch.zeros(header.num_bytes(dtype), dtype=torch.uint8)
    shapes = header.shapes
    factors = carve(run, shapes, dtype)
    merged: dict[str, HostFactors] = {}
    try:
        with private_copy(file) as copy, safe_open(copy, framework="pt") as tensors:
            version = registered_content(header, copy)
            for target in header.targets:
                a, b, kept = read_layer(file, target, tensors, base_layers)
                for to, part in zip(factors[target.site], kept, strict=True):
                    to.copy_(part)
                if target.cut.shape.is_split:
                    whole = target.merged.apply(a.to(dtype), b.to(dtype))
                    merged[target.site] = HostFactors(*(part.clone(memory_format=_ROWS) for part in whole))
    except (SafetensorError, OSError) as error:
        raise BadAdapter(f"{file}: cannot be read as safetensors ({error})") from error
    check_finite(file, header.targets, run.view(dtype), factors)
    can_merge = all(can_be_undone(target, factors[target.site].bt) for target in header.targets)
    return HostAdapter(
        key=key,
        version=version,
        run=run,
        dtype=dtype,
        shapes=shapes,
        heads=header.heads,
        rank=header.rank,
        touches_vision=header.touches_vision,
        merge_fidelity=measure(_unsplit(factors, shapes, merged)) if can_merge else 0.0,
        merged=merged,
        can_merge=can_merge,
    )


def unsplit(adapter: HostAdapter) -> dict[str, HostFactors]:
    """An adapter's factors by layer, dense and not split over ranks."""
    return _unsplit(carve(adapter.run, adapter.shapes, adapter.dtype), adapter.shapes, adapter.merged)


def _unsplit(
    factors: Mapping[str, HostFactors], shapes: Mapping[str, FactorShape], merged: Mapping[str, HostFactors]
) -> dict[str, HostFactors]:
    return {name: merged.get(name) or HostFactors(*dense(shapes[name], *pair)) for name, pair in factors.items()}
