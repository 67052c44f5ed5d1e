"""Composes adapters: one adapter with the weighted sum of their deltas, as PEFT's `combination_type="cat"` makes.

Its factors are those of the parts, below each other: a has the rows of every a, bt the weighted rows of every bt.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from heads import TaskHead
from vlora.errors import BadAdapter, BadRequest
from vlora.lora.host_adapter import HostAdapter, Measure, unsplit
from vlora.lora.layout import carve, run_bytes
from vlora.lora.peft_format import AdapterHeader
from vlora.parallel.adapter_sharding import FactorShape

_FORMS = {"scale": "DoRA", "shift": "trained biases", "gain": "IA3", "input": "IA3"}
_KINDS = {"replaced": "modules_to_save", "tokens": "trainable_token_indices"}


@dataclasses.dataclass(frozen=True)
class ComposedHeader:
    """As `AdapterHeader`, for a composition: it has no heads, and applies to all tokens."""

    shapes: Mapping[str, FactorShape]
    touches_vision: bool
    heads: Mapping[str, TaskHead] = dataclasses.field(default_factory=dict)
    invocation: tuple[int, ...] = ()
    keeps_blocks: bool = False

    @property
    def rank(self) -> int:
        return max(shape.rank for shape in self.shapes.values())

    def first_token(self, prompt_ids: tuple[int, ...]) -> int:
        return 0

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the factors in memory, as values of `dtype`."""
        return run_bytes(self.shapes, dtype)


def check_composable(name: str, header: AdapterHeader) -> None:
    """Raises BadRequest, with the feature, if an adapter changes more than weights by LoRA factors."""
    features = {_FORMS[row] for target in header.targets for row in target.cut.shape.rows}
    features |= {_KINDS[target.cut.shape.kind] for target in header.targets if target.cut.shape.kind in _KINDS}
    if header.invocation:
        features.add("alora_invocation_tokens")
    if features:
        raise BadRequest(
            f"adapter {name!r} cannot be composed: it has {' and '.join(sorted(features))}; compose adapters that have "
            "LoRA factors only",
            field="adapter",
        )


def composed_header(parts: Sequence[AdapterHeader], sites: Iterable[str]) -> ComposedHeader:
    """The header of a composition. sites: the model's adaptable layers, in the order of an adapter's factors."""
    shapes: dict[str, FactorShape] = {}
    for target in (target for header in parts for target in header.targets):
        shape, before = target.merged.shape, shapes.get(target.site)
        rank = shape.rank + (before.rank if before else 0)
        shapes[target.site] = FactorShape(rank, shape.d_in, shape.d_out)
    ordered = {site: shapes[site] for site in sites if site in shapes}
    return ComposedHeader(ordered, touches_vision=any(header.touches_vision for header in parts))


def compose(
    key: str, parts: Sequence[tuple[HostAdapter, float]], sites: Iterable[str], measure: Measure
) -> HostAdapter:
    """Compose adapters in host memory.

    Args:
        measure: Computes the merge fidelity.

    Raises:
        BadAdapter: A weighted factor is not finite in the factors' type.
    """
    factors = [unsplit(adapter) for adapter, _ in parts]
    dtype = parts[0][0].dtype
    shapes: dict[str, FactorShape] = {}
    for site in sites:
        if found := [own[site] for own in factors if site in own]:
            rank = sum(len(pair.a) for pair in found)
            shapes[site] = FactorShape(rank, found[0].a.shape[1], found[0].bt.shape[1])
    run = torch.zeros(run_bytes(shapes, dtype), dtype=torch.uint8)
    composed = carve(run, shapes, dtype)
    for site, (a, bt) in composed.items():
        row = 0
        for (_, weight), own in zip(parts, factors, strict=True):
            if site in own:
                rows = slice(row, row + len(own[site].a))
                a[rows] = own[site].a
                bt[rows] = own[site].bt * weight
                row = rows.stop
    if not torch.isfinite(run.view(dtype)).all():
        raise BadAdapter(
            f"adapter {key.rpartition('@')[0]!r} has values that are not finite in {dtype}; lower its weights"
        )
    return HostAdapter(
        key=key,
        version=composed_version((adapter.version, weight) for adapter, weight in parts),
        run=run,
        dtype=dtype,
        shapes=shapes,
        heads={},
        rank=max(shape.rank for shape in shapes.values()),
        touches_vision=any(adapter.touches_vision for adapter, _ in parts),
        merge_fidelity=measure(composed),
    )


def composed_version(parts: Iterable[tuple[str, float]]) -> str:
    """The version of a composition, from those of its adapters in order of name, and their weights."""
    contents = " ".join(f"{weight!r} {version}" for version, weight in parts)
    return hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()
