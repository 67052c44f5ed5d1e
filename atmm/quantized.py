"""Weights in fewer bits: values, and scales by output row, in a format that quantizes, restores and multiplies them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

BLOCK = 2 * 2**20
"""Weights converted at a time: 8 MiB in float32. Larger ones are mapped and unmapped (docs/decisions/0035)."""


class Integers(NamedTuple):
    """A format of integers [d_out, d_in] with float32 scales.

    bits: 4 or 8. group: inputs with one scale; 0: all inputs of a row. zero: the value of weight 0; 0 with offsets.
    signed: values are two's complement, and 128 is added to them.
    """

    bits: int
    group: int
    zero: int
    signed: bool
    offsets: bool


class WeightFormat(Protocol):
    """A way to store weights [..., out, in] as values [..., out, v] and scales [..., out, s].

    Attributes:
        value_dtype: the type of the values; scales are float32.
        weights_per_value: in / v.
        alignment: in is a multiple of this.
    """

    @property
    def name(self) -> str: ...
    @property
    def value_dtype(self) -> torch.dtype: ...
    @property
    def weights_per_value(self) -> int: ...
    @property
    def alignment(self) -> int: ...

    def num_scales(self, d_in: int) -> int:
        """s, for rows of d_in weights."""

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The values and scales of weights [..., out, in] of any floating type."""

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        """The weights in float32, [..., out, in]."""

    def product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] times the weights [out, in] transposed, plus bias: [T, out], contiguous, of x's type."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Weights [..., out, in] in a format. Indexing and splitting give views, as of a tensor.

    Attributes:
        values: [..., out, v].
        scales: float32 [..., out, s].
        dtype: the type of the weights before quantization, and of products.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.values.shape[-1] * self.format.weights_per_value)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: Any) -> QuantizedWeight:
        """A view. place: an index of any dimensions but the last."""
        return self._with(self.values[place], self.scales[place])

    def split(self, sizes: Sequence[int], dim: int = 0) -> list[QuantizedWeight]:
        """Views of consecutive parts. dim: not the last."""
        pairs = zip(self.values.split(list(sizes), dim), self.scales.split(list(sizes), dim), strict=True)
        return [self._with(values, scales) for values, scales in pairs]

    def copy_(self, source: Tensor | QuantizedWeight) -> QuantizedWeight:
        """Become a copy of other quantized weights, or of a tensor [..., out, in], which is quantized."""
        if isinstance(source, QuantizedWeight):
            self.values.copy_(source.values)
            self.scales.copy_(source.scales)
        elif source.dim() > 2:
            for place, part in enumerate(source):
                self[place].copy_(part)
        else:
            num_rows = max(1, BLOCK // source.shape[1])
            for first in range(0, len(source), num_rows):
                values, scales = self.format.encode(source[first : first + num_rows].to(self.device))
                self.values[first : first + num_rows] = values
                self.scales[first : first + num_rows] = scales
        return self

    def float(self) -> Tensor:
        return self.format.decode(self.values, self.scales)

    def rounded(self, weights: Tensor) -> Tensor:
        """Other weights [..., out, in] as this format would store them, in float32."""
        return self.format.decode(*self.format.encode(weights))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] times the weights [out, in] transposed, plus bias: [..., out]."""
        if x.dim() == 2:
            return self.format.product(x, self.values, self.scales, bias)
        y = self.format.product(x.reshape(-1, x.shape[-1]), self.values, self.scales, bias)
        return y.view(*x.shape[:-1], y.shape[1])

    def _with(self, values: Tensor, scales: Tensor) -> QuantizedWeight:
        return QuantizedWeight(values, scales, self.dtype, self.format)


def quantized_bytes(weight_format: WeightFormat, shape: Sequence[int]) -> int:
    *rows, width = shape
    per_row = width // weight_format.weights_per_value * weight_format.value_dtype.itemsize
    return math.prod(rows) * (per_row + 4 * weight_format.num_scales(width))


StoredWeight = Tensor | QuantizedWeight
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], StoredWeight]
"""Returns undefined weights of a shape and a type, as `torch.empty`."""


def quantized_empty(
    weight_format: WeightFormat,
    device: torch.device,
    empty: Callable[[Sequence[int], torch.dtype, torch.device], Tensor],
) -> Allocate:
    """A function that allocates weights of a format on one device, in memory from `empty`."""

    def allocate(shape: Sequence[int], dtype: torch.dtype, _: torch.device) -> QuantizedWeight:
        *rows, width = shape
        values = empty([*rows, width // weight_format.weights_per_value], weight_format.value_dtype, device)
        scales = empty([*rows, weight_format.num_scales(width)], torch.float32, device)
        return QuantizedWeight(values, scales, dtype, weight_format)

    return allocate


class HeldWeight(NamedTuple):
    """A weight [d_out, d_in] in the form in which a layer holds it.

    parameter: the weight, or the values of a quantized one. quantized: None if it is not quantized.
    """

    parameter: nn.Parameter
    quantized: QuantizedWeight | None

    @classmethod
    def of(cls, weight: StoredWeight) -> HeldWeight:
        """References the weight, without a copy."""
        if isinstance(weight, QuantizedWeight):
            return cls(nn.Parameter(weight.values, requires_grad=False), weight)
        return cls(nn.Parameter(weight, requires_grad=False), None)

    @property
    def stored(self) -> StoredWeight:
        return self.parameter if self.quantized is None else self.quantized


class StoredLinear(nn.Linear):
    """An `nn.Linear` with replaceable weights of both kinds.

    quantized: the weight where it is quantized; `weight` has its values then.
    """

    quantized: QuantizedWeight | None = None

    @property
    def stored(self) -> StoredWeight:
        """The weight [d_out, d_in] that products use."""
        return self.weight if self.quantized is None else self.quantized

    def hold(self, weight: HeldWeight) -> None:
        """Use another weight.

        A switch calls this for every layer of the model, so it writes what `nn.Module.__setattr__` would write, without
        its checks.
        """
        self._parameters["weight"] = weight.parameter
        self.__dict__["quantized"] = weight.quantized
