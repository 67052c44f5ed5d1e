"""A linear layer with a weight that may be quantized."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from atmm.quantized import QuantizedWeight, StoredWeight


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
