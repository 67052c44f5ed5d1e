"""A base model that is served quantized: adapters are trained on its rounded weights (QLoRA, arXiv:2305.14314)."""

from __future__ import annotations

from typing import Any

import torch

from atmm.formats import FORMATS
from atmm.quantized import BLOCK
from vlora.config import Quantize
from vlora.errors import BadConfig
from vlora.models.stored_quantized import language_linears


def round_base(model: Any, quantize: Quantize) -> None:
    """Round the weights that `vlora serve --quantize` rounds, in place and in their dtype.

    Products round their inputs too when they are served; trainings do not.

    Args:
        model: A transformers model.
        quantize: The format.

    Raises:
        BadConfig: The format cannot store one of the layers.
    """
    if quantize == "none":
        return
    weight_format = FORMATS[quantize]
    with torch.no_grad():
        for name, linear in language_linears(model).items():
            if linear.in_features % weight_format.alignment:
                raise BadConfig(
                    f"quantize {quantize} needs layers with inputs in multiples of {weight_format.alignment}; "
                    f"{name} has {linear.in_features}; set another format"
                )
            for rows in linear.weight.split(max(1, BLOCK // linear.in_features)):
                rows.copy_(weight_format.decode(*weight_format.encode(rows)))
