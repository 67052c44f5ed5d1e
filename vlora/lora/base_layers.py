"""W0 and the biases of a loaded model, for adapters that depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import nn

from atmm.quantized import QuantizedWeight, StoredWeight
from atmm.stored_linear import StoredLinear
from vlora.lora.base_weights import BaseWeights
from vlora.lora.merge_fidelity import ComputeStream
from vlora.lora.output_changes import row_norms
from vlora.lora.weight_slabs import WeightSlabs


class LoadedBaseLayers:
    """The `BaseLayers` of a model in slabs. Merged weights are not read."""

    def __init__(
        self,
        slabs: WeightSlabs,
        unmerged: Mapping[str, nn.Linear | nn.Embedding],
        base_weights: BaseWeights | None = None,
        stream: ComputeStream | None = None,
    ) -> None:
        """Create the view.

        Args:
            unmerged: The layers of the vision side, the output head and the token embedding, which are never merged.
            base_weights: W0 in host memory, for slabs that merged weights overwrite; None if the slabs always hold W0.
            stream: A separate stream of the slabs' GPU, which computes; None computes on the caller's.
        """
        self._slabs = slabs
        self._unmerged = unmerged
        self._base_weights = base_weights
        self._stream = stream

    @torch.no_grad()
    def row_norms(self, site: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """PEFT computes the norm in the type of the adapter's factors, which it loads in float32."""
        weight = self._weight(site)
        with contextlib.nullcontext() if self._stream is None else self._stream.current():
            return row_norms(weight, a.to(weight.device), b.to(weight.device)).cpu()

    def bias(self, site: str) -> torch.Tensor:
        layer = self._unmerged[site] if site in self._unmerged else self._slabs.linears[site]
        bias = layer.bias if isinstance(layer, nn.Linear) else None
        return torch.zeros(1) if bias is None else bias.detach().cpu().float()

    def has_weight(self, site: str, weight: torch.Tensor) -> bool:
        own = self._weight(site)
        if isinstance(own, QuantizedWeight):
            return torch.equal(own.float(), own.rounded(weight.to(own.device)))
        return torch.equal(own.detach().cpu(), weight.to(own.dtype))

    def _weight(self, site: str) -> StoredWeight:
        if site in self._unmerged:
            layer = self._unmerged[site]
            return layer.stored if isinstance(layer, StoredLinear) else layer.weight
        return self._slabs.entry(site) if self._base_weights is None else self._base_weights.weight(site)
