"""A linear layer with a weight that may be quantized."""

from __future__ import annotations

from torch import nn

from atmm.quantized import QuantizedWeight, StoredWeight


class StoredLinear(nn.Linear):
    """An `nn.Linear` with replaceable weights of both kinds.

    quantized: the weight where it is quantized; `weight` has its values then.
    """

    quantized: QuantizedWeight | None = None

    @property
    def stored(self) -> StoredWeight:
        """The weight [d_out, d_in] that products use."""
        return self.weight if self.quantized is None else self.quantized

    def hold(self, weight: StoredWeight) -> None:
        """Use another weight, which is referenced, not copied. A layer with a quantized weight keeps to that kind."""
        if isinstance(weight, QuantizedWeight):
            self.quantized, weight = weight, weight.values
        if weight.dtype is self.weight.dtype:
            self.weight.data = weight
        else:
            self.weight = nn.Parameter(weight, requires_grad=False)
