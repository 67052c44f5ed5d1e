"""Reads the tensors of one layer of an adapter, as they are stored in memory.

The rows of Bt below the factors are computed here, once, from the base model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atmm.quantized import QuantizedWeight, StoredLinear, StoredWeight
from vlora.errors import BadAdapter
from vlora.lora.layout import HostFactors
from vlora.lora.output_changes import SMALLEST_SCALE, row_norms
from vlora.lora.peft_target import Part, TargetHeader

if TYPE_CHECKING:
    from vlora.lora.base_weights import BaseWeights
    from vlora.lora.weight_slabs import WeightSlabs
    from vlora.memory.host_to_device import SideStream


@dataclasses.dataclass(eq=False)
class BaseLayers:
    """The base model's adaptable layers with W0, whatever is merged. Thread-safe.

    unmerged: layers that are never merged: the vision side, the output head, the token embedding. base_weights: W0 in
    host memory, for slabs that merged weights overwrite. stream: of the slabs' GPU, which computes; None: the caller's.
    """

    slabs: WeightSlabs
    unmerged: Mapping[str, nn.Linear | nn.Embedding]
    base_weights: BaseWeights | None = None
    stream: SideStream | None = None

    @torch.no_grad()
    def row_norms(self, site: str, a: Tensor, b: Tensor) -> Tensor:
        """The norm of each row of `W0 + b a` [d_out], on the CPU in float32, as PEFT computes it for such factors.

        Args:
            a: [r, d_in] in float32.
            b: [d_out, r] in float32, with the scaling.
        """
        weight = self._weight(site)
        with contextlib.nullcontext() if self.stream is None else self.stream.current():
            return row_norms(weight, a.to(weight.device), b.to(weight.device)).cpu()

    def bias(self, site: str) -> Tensor:
        """The layer's bias on the CPU in float32, of shape [d_out], or [1] with 0 if it has none."""
        layer = self.unmerged[site] if site in self.unmerged else self.slabs.linears[site]
        bias = layer.bias if isinstance(layer, nn.Linear) else None
        return torch.zeros(1) if bias is None else bias.detach().cpu().float()

    def has_weight(self, site: str, weight: Tensor) -> bool:
        """Whether W0 of a layer is this weight, rounded to its type."""
        own = self._weight(site)
        if isinstance(own, QuantizedWeight):
            return torch.equal(own.float(), own.rounded(weight.to(own.device)))
        return torch.equal(own.detach().cpu(), weight.to(own.dtype))

    def _weight(self, site: str) -> StoredWeight:
        if site in self.unmerged:
            layer = self.unmerged[site]
            return layer.stored if isinstance(layer, StoredLinear) else layer.weight
        return self.slabs.entry(site) if self.base_weights is None else self.base_weights.weight(site)


def read_layer(
    file: Path, target: TargetHeader, tensors: Any, base_layers: BaseLayers | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Read a layer.

    Returns:
        The factors as on disk, a and b, with the scaling in b; and what this process stores of them, with further rows.

    Raises:
        BadAdapter: A row is not finite, or the file differs from the header.
    """
    if target.part is not None:
        tensors = _Rows(tensors, target, target.part)
    a, b = (
        tensors.get_tensor(name) if name else torch.zeros(shape)
        for name, shape in zip((target.tensor_a, target.tensor_b), target.disk, strict=True)
    )
    if target.is_transposed:
        a, b = a.t(), b.t()
    if (tuple(a.shape), tuple(b.shape)) != target.disk:
        raise _changed(file)
    if target.base_copy is not None:
        assert base_layers is not None
        if not base_layers.has_weight(target.site, tensors.get_tensor(target.base_copy)):
            raise BadAdapter(
                f"{file}: tensor {target.base_copy!r} is not this base model's weight; the adapter was made for "
                "another model, or changes the weight beside its factors, which is not supported"
            )
    b = b.float() * target.scale
    rows_a, rows_bt = target.cut.apply(a, b)
    if target.vector is not None:
        change = _checked(tensors.get_tensor(target.vector).float().flatten() - 1, f"{file}: tensor {target.vector!r}")
        on_input = "input" in target.cut.shape.rows
        if change.shape[1] != (a.shape[1] if on_input else len(b)):
            raise _changed(file)
        return a, b, (change, rows_bt) if on_input else (rows_a, change[:, target.cut.b_rows])
    if target.cut.shape.rows:
        assert base_layers is not None, "rows that depend on W0 need the base model"
        rows_bt = torch.cat([rows_bt, *_further_rows(file, target, tensors, a, b, base_layers)])
    return a, b, (rows_a, rows_bt)


class _Rows:
    """An opened file that gives only one part's rows of the tensors with a row per output."""

    def __init__(self, tensors: Any, target: TargetHeader, part: Part) -> None:
        self._tensors = tensors
        self._rows = slice(part.start, part.stop)
        self._names = {target.tensor_b, target.magnitude, target.vector, *target.biases}

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors.get_tensor(name)
        return tensor[self._rows] if name in self._names else tensor


def _further_rows(
    file: Path, target: TargetHeader, tensors: Any, a: Tensor, b: Tensor, base_layers: BaseLayers
) -> list[Tensor]:
    """The rows in the order of the shape's `rows`, each [1, d_out] in float32."""
    rows = target.cut.b_rows  # of this rank

    def read(name: str) -> Tensor:
        tensor = tensors.get_tensor(name)
        if tuple(tensor.shape) != (len(b),):
            raise _changed(file)
        return tensor.float()[rows]

    found: list[Tensor] = []
    if target.magnitude is not None:
        scale = read(target.magnitude) / base_layers.row_norms(target.site, a.float(), b[rows])
        found.append(_checked(scale - 1, f"{file}: tensor {target.magnitude!r} over the norms of the adapted weight"))
    if target.biases:
        shift = torch.zeros(len(b[rows]))
        for name in target.biases:
            if name.endswith(".lora_B.bias"):
                shift += read(name) * target.scale
            elif target.cut.shape.kind == "replaced":
                shift += read(name)
            else:
                shift += read(name) - base_layers.bias(target.site)
        found.append(_checked(shift, f"{file}: tensor {' or '.join(map(repr, target.biases))}"))
    return found


def can_be_undone(target: TargetHeader, bt: Tensor) -> bool:
    """Whether mixed mode can undo this layer's part of a merged adapter exactly. The vision side is never merged.

    The scales of other ranks are not known here.
    """
    if target.vision or not target.cut.shape.rows:
        return True
    if target.biases or target.vector is not None or bt.shape[1] != target.disk[1][0]:
        return False
    return bool(((1 + bt[target.rank].float()).abs() >= SMALLEST_SCALE).all())


def _checked(row: Tensor, source: str) -> Tensor:
    if not torch.isfinite(row).all():
        raise BadAdapter(f"{source} contains values that are not finite (NaN or infinity)")
    return row[None]


def _changed(file: Path) -> BadAdapter:
    return BadAdapter(f"{file.parent}: the files changed while they were read; load the adapter again")


def check_finite(
    file: Path, targets: Iterable[TargetHeader], values: Tensor, factors: Mapping[str, HostFactors]
) -> None:
    """Raise BadAdapter, with the tensor's name, if any value is not finite.

    A NaN or infinity makes the sum of all values non-finite. The sum may also overflow, so each tensor is then checked.
    """
    if math.isfinite(values.sum(dtype=torch.float32).item()):
        return
    for target in targets:
        labels = target.first_tensor, target.tensor_b or target.first_tensor
        for tensor, label in zip(factors[target.site], labels, strict=True):
            if not torch.isfinite(tensor).all():
                raise BadAdapter(
                    f"{file}: tensor {label!r} contains values that are not finite (NaN or infinity) in {tensor.dtype}"
                )
