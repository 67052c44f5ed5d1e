"""One-shot switching between inference modes (V-LoRA section 4.4.1): what every strategy does, and how a merge is cut
into calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

import atmm
from vlora.lora import HostFactors
from vlora.lora.adapter_pool import AdapterBank
from vlora.lora.weight_slabs import WeightSlabs
from vlora.parallel.adapter_sharding import FactorShape, parts_of


class ModeSwitcher(Protocol):
    """Puts `W0` or `W0 + delta` of one adapter under the language model.

    in_place: merged weights are written over W0, so that nothing is at hand: every switch is a pass over the weights.
    """

    in_place: bool
    merged_key: str | None

    def switch(self, key: str | None) -> bool:
        """Put the merged weights of adapter `key` (None: W0) in place. Returns whether anything changed.

        The adapter must be resident in the bank. Layers it does not touch have W0. A switch that fails leaves W0.
        """

    def forget(self, key: str) -> None:
        """The adapter is gone, or about to go: nothing of it may be in place or used again."""

    def base_rows(self, name: str, step: int) -> torch.Tensor:
        """Every `step`th row of a layer's W0, whatever is in place."""


@dataclasses.dataclass(frozen=True)
class MergeRun:
    """Neighbouring slab entries [first, last) with factors of one shape, merged in one call."""

    shape: tuple[int, int]
    first: int
    last: int
    names: tuple[str, ...]


def merge_runs(slabs: WeightSlabs, shapes: Mapping[str, FactorShape]) -> list[MergeRun]:
    """Cut an adapter's layers into runs of neighbouring slab entries with factors of equal shape. shapes: by adapted
    layer."""
    runs: list[MergeRun] = []
    for name, (shape, index) in slabs.slots.items():
        if name not in shapes:
            continue
        last = runs[-1] if runs else None
        if last and (last.shape, last.last) == (shape, index) and shapes[last.names[0]] == shapes[name]:
            runs[-1] = MergeRun(shape, last.first, index + 1, (*last.names, name))
        else:
            runs.append(MergeRun(shape, index, index + 1, (name,)))
    return runs


def merge_layers(
    bank: AdapterBank, key: str, names: Sequence[str], out: torch.Tensor, base: torch.Tensor, sign: float = 1.0
) -> None:
    """Write `base + sign * delta` into `out`, both [len(names), out, in], for the layers of a MergeRun (or a part of
    one)."""
    a, bt = bank.stacked(key, names)
    for part in parts_of(bank.shapes(key)[names[0]], a, bt):
        place = (slice(None), part.outputs, part.inputs)
        atmm.merge(out[place], base[place], part.a, part.bt, sign)


@torch.no_grad()
def merge_fidelity(
    slabs: WeightSlabs, switcher: ModeSwitcher, factors: Mapping[str, HostFactors], num_rows: int = 64
) -> float:
    """How much of an adapter survives merging: 1 - |round(W0 + d) - W0 - d| / |d|, on evenly spread rows of every
    layer.

    1.0 loses nothing; an adapter that moves no language-model weight counts as 1.0, since merging it changes nothing.
    """
    lost = total = 0.0
    for name, pair in factors.items():
        if name not in slabs.slots:
            continue
        step = max(1, slabs.slots[name].shape[0] // num_rows)
        base = switcher.base_rows(name, step)
        # The difference is taken in float32: exact enough for W0 of 16 bits, and 1.0 within rounding for float32
        # weights.
        weight = base.float()
        delta = (pair.bt[:, ::step].float().t() @ pair.a.float()).to(weight.device)
        merged = (weight + delta).to(base.dtype).float()
        lost += float((merged - weight - delta).square().sum())
        total += float(delta.square().sum())
    return 1.0 if total == 0 else max(0.0, 1.0 - (lost / total) ** 0.5)
