"""Block-diagonal adapters (BD-LoRA section 3): which factor of which layer has blocks, and what has to be divisible.

Layers are cut as tensor parallelism cuts them. In N blocks, each of them is a LoRA of its own, of rank r / N, on one
rank's part of the layer. Layers that ranks do not share stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from peft import BdLoraConfig
from torch import nn

from fusion.plan.schema import LoraPlan
from vlora.parallel.adapter_sharding import Side
from vlora.parallel.layer_sharding import COLUMN_PARALLEL, ROW_PARALLEL


def block_side(name: str) -> Side | None:
    """Which factor of a layer of the language model is block-diagonal; None where both stay dense.

    PEFT's two help texts contradict each other; it is B where outputs are shared between ranks, and A where inputs are.
    """
    leaf = name.rpartition(".")[2]
    return "b" if leaf in COLUMN_PARALLEL else "a" if leaf in ROW_PARALLEL else None


def block_config(lora: LoraPlan) -> BdLoraConfig | None:
    """What PEFT trains and stores; None for ordinary LoRA."""
    if lora.blocks == 1:
        return None
    return BdLoraConfig(
        target_modules_bd_a=list(ROW_PARALLEL),
        target_modules_bd_b=list(COLUMN_PARALLEL),
        nblocks=lora.blocks,
        match_strict=False,
    )


def scaled_alpha(lora: LoraPlan) -> float:
    """The alpha that goes into the adapter's file, whose scaling PEFT and servers take from the whole rank.

    A block is a LoRA of rank r / N: its scaling is alpha / (r / N), or for rsLoRA alpha / sqrt(r / N), the paper's
    alpha sqrt(N) / sqrt(r). So the file's alpha is N, or sqrt(N), times the plan's.
    """
    if lora.blocks == 1:
        return lora.alpha
    return lora.alpha * (math.sqrt(lora.blocks) if lora.rslora else lora.blocks)


def num_parameters(lora: LoraPlan, name: str, layer: nn.Linear) -> int:
    """Numbers in both factors of a layer, the zeros between blocks left out."""
    side = block_side(name)
    inputs = layer.in_features // (lora.blocks if side == "a" else 1)
    outputs = layer.out_features // (lora.blocks if side == "b" else 1)
    return lora.rank * (inputs + outputs)


def undivided(lora: LoraPlan, layers: Mapping[str, nn.Linear]) -> str | None:
    """Why these layers cannot have so many blocks, if they cannot."""
    if lora.blocks == 1:
        return None
    if lora.vision:
        return (
            "not together with lora.vision: ranks do not share the vision side, and PEFT tells block-diagonal layers "
            "from others by the last part of their names, which its layers may have, too"
        )
    if lora.rank % lora.blocks:
        return f"{lora.blocks} blocks do not divide rank {lora.rank}; {next_multiple(lora.rank, lora.blocks)} would do"
    for name, layer in layers.items():
        if wrong := undivided_layer(name, layer.in_features, layer.out_features, lora.blocks):
            return wrong
    return None


def undivided_layer(name: str, d_in: int, d_out: int, blocks: int) -> str | None:
    """Why a layer cannot have so many blocks, if it cannot."""
    width, what = (d_in, "inputs") if block_side(name) == "a" else (d_out, "outputs")
    if block_side(name) is None or width % blocks == 0:
        return None
    return f"{blocks} blocks do not divide the {width} {what} of {name}; choose a number that does"


def next_multiple(rank: int, blocks: int) -> int:
    """The smallest rank of at least this one that so many blocks divide."""
    return -(-rank // blocks) * blocks
