"""The formats of quantized weights by name."""

from __future__ import annotations

from collections.abc import Mapping

from atmm.fp8 import Fp8
from atmm.grouped import Grouped
from atmm.int8 import Int8
from atmm.quantized import WeightFormat

FORMATS: Mapping[str, WeightFormat] = {"fp8": Fp8(), "int8": Int8(), "int4": Grouped(4, 32, symmetric=True)}
