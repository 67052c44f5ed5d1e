"""Layers with weights of an adapter instead of the base model's (PEFT's `modules_to_save`). They are never merged.

The output head and the token embedding may also have LoRA factors, or a weight of their own for some tokens only
(PEFT's `trainable_token_indices`). Every row of a batch uses the weight of its own
request's adapter there, in every mode. Layers of the vision side use the lanes of its images.

Block-diagonal adapters (BD-LoRA), too, have other factors than two dense matrices at a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atmm
from atmm.matmul import linear, widened
from vlora.parallel.adapter_sharding import FactorShape, parts_of
from vlora.parallel.layer_sharding import LinearShard


class Row(Protocol):
    """The rows [start, stop) of a batch, of a request with this adapter (None: the base model)."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class OwnLayer:
    """The adapters' weights of one layer of the base model, by key.

    layer: the base model's. tied: name of the layer that changes with this one's tokens, since both share a weight.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, tied: str | None = None) -> None:
        self.layer = layer
        self.tied = tied
        d_out, d_in = layer.weight.shape
        self.shard = LinearShard.whole(d_in, d_out)
        self._weights: dict[str, Tensor] = {}
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        self._tokens: dict[str, tuple[Tensor, Tensor]] = {}  # token ids [n] and their weights [n, d_in]

    def __bool__(self) -> bool:
        return bool(self._weights or self._factors or self._tokens)

    def attach(self, key: str, shape: FactorShape, factors: tuple[Tensor, Tensor]) -> None:
        """Register an adapter's weight or factors. They are referenced, not copied."""
        if shape.kind == "replaced":
            self._weights[key] = factors[0]
        elif shape.kind == "tokens":
            known = self._tokens.get(key)  # of an adapter that was moved
            ids = torch.tensor(shape.tokens, device=factors[0].device) if known is None else known[0]
            self._tokens[key] = ids, factors[0]
        else:
            self._factors[key] = factors

    def detach(self, key: str) -> None:
        """Remove an adapter; unknown keys are ignored."""
        self._weights.pop(key, None)
        self._factors.pop(key, None)
        self._tokens.pop(key, None)

    def look_up(self, out: Tensor, ids: Tensor, rows: Iterable[Row]) -> None:
        """As the embedding: correct its outputs [T, hidden] for token ids [T] in place, in the rows of adapters."""
        for row in rows:
            place = slice(row.start, row.stop)
            if row.adapter in self._weights:
                out[place] = F.embedding(ids[place], self._weights[row.adapter])
            elif row.adapter in self._factors:
                a, bt = self._factors[row.adapter]
                out[place] += torch.mm(*widened(bt[:, ids[place]].t(), a))
            elif row.adapter in self._tokens:
                tokens, weights = self._tokens[row.adapter]
                equal = ids[place, None] == tokens
                own = weights[equal.int().argmax(1)]
                out[place] = torch.where(equal.any(1, keepdim=True), own, out[place])

    def multiply(self, out: Tensor, x: Tensor, adapters: Sequence[str | None]) -> None:
        """As the output head: correct its logits in place.

        Args:
            out: The base model's logits, float32 [T, vocab].
            x: Hidden states [T, hidden].
            adapters: The adapter of each row. Adjacent rows of one adapter are computed together.
        """
        stop = 0
        for adapter, rows in groupby(adapters):
            start, stop = stop, stop + sum(1 for _ in rows)
            if adapter in self._weights:
                out[start:stop] = linear(x[start:stop], self._weights[adapter], None)
            elif adapter in self._factors:
                own, a, bt = widened(x[start:stop], *self._factors[adapter])
                out[start:stop] += own @ a.t() @ bt
            elif adapter in self._tokens:
                tokens, weights = self._tokens[adapter]
                out[start:stop, tokens] = linear(x[start:stop], weights, None).to(out.dtype)


class OwnLayers:
    """The `OwnLayer`s of a model. by_name: both, by the names of the model's modules."""

    def __init__(self, model: nn.Module, head: nn.Linear, embedding: nn.Embedding) -> None:
        names = {module: name for name, module in model.named_modules()}
        tied = names[head] if getattr(model.config, "tie_word_embeddings", False) else None
        self.head, self.embedding = OwnLayer(head), OwnLayer(embedding, tied)
        self.by_name = {names[own.layer]: own for own in (self.head, self.embedding)}


class ReplacedOutputs:
    """The `Placement` of weights that replace the one of an adaptable layer."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}

    def attach(self, key: str, shape: FactorShape, factors: tuple[Tensor, Tensor]) -> None:
        self._weights[key] = factors[0]

    def detach(self, key: str) -> None:
        self._weights.pop(key, None)

    def add(self, y: Tensor, x: Tensor, plan: atmm.SegmentPlan) -> None:
        """Write the outputs of every lane's own weight, without a bias, into y [T, d_out]."""
        for lane in plan.lanes:
            if lane.key in self._weights:
                y[lane.start : lane.stop] = linear(x[lane.start : lane.stop], self._weights[lane.key], None)


class Placement(Protocol):
    """Adds the deltas of adapters with factors other than two dense matrices at a layer."""

    def attach(self, key: str, shape: FactorShape, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Register an adapter's factors under its key. They are referenced, not copied."""
        ...

    def detach(self, key: str) -> None:
        """Remove an adapter; unknown keys are ignored."""
        ...

    def add(self, y: torch.Tensor, x: torch.Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to y [T, d_out], in place. Lanes of other adapters add nothing."""
        ...


class BlockSites:
    """The sites of a layer's block-diagonal adapters (BD-LoRA), all with the same block side and number of blocks.

    Every block is a separate site, so that the zeros between blocks are neither stored nor multiplied.
    """

    def __init__(self, name: str, shape: FactorShape) -> None:
        d_in = shape.d_in // shape.parts if shape.kind == "blocks_a" else shape.d_in
        d_out = shape.d_out // shape.parts if shape.kind == "blocks_b" else shape.d_out
        self._sites = [atmm.Site(f"{name}[{block}]", d_in, d_out) for block in range(shape.parts)]
        self._places: list[tuple[slice, slice]] = []

    def attach(self, key: str, shape: FactorShape, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        parts = parts_of(shape, *factors)
        self._places = [(part.outputs, part.inputs) for part in parts]
        for site, part in zip(self._sites, parts, strict=True):
            site.factors[key] = atmm.Factors(part.a, part.bt)

    def detach(self, key: str) -> None:
        for site in self._sites:
            site.factors.pop(key, None)

    def add(self, y: torch.Tensor, x: torch.Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to y [T, d_out], in place."""
        if self._sites[0].factors.keys().isdisjoint(plan.keys):
            return
        for site, (outputs, inputs) in zip(self._sites, self._places, strict=True):
            atmm.add_delta(y[:, outputs], x[:, inputs], site, plan)


def new_placement(site: str, shape: FactorShape) -> Placement:
    """An empty placement for factors of this shape's kind and number of parts. Sharding makes those over ranks."""
    return ReplacedOutputs() if shape.kind == "replaced" else BlockSites(site, shape)
