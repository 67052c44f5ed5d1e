"""Block-diagonal adapters (BD-LoRA section 3): the factors of each layer that have blocks, and divisibility checks.

Layers are sharded as in tensor parallelism. With N blocks, each block is a LoRA of rank r / N on one rank's shard of
the layer. Layers that are not sharded stay dense.
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
    """The block-diagonal factor of a layer of the language model; None if both factors are dense.

    PEFT's two help texts contradict each other: it is B if outputs are sharded, and A if inputs are sharded.
    """
    leaf = name.rpartition(".")[2]
    return "b" if leaf in COLUMN_PARALLEL else "a" if leaf in ROW_PARALLEL else None


def block_config(lora: LoraPlan) -> BdLoraConfig | None:
    if lora.blocks == 1:
        return None
    return BdLoraConfig(
        target_modules_bd_a=list(ROW_PARALLEL),
        target_modules_bd_b=list(COLUMN_PARALLEL),
        nblocks=lora.blocks,
        match_strict=False,
    )


def scaled_alpha(lora: LoraPlan) -> float:
    """The alpha for the adapter's config, from which PEFT and servers compute the scaling with the whole rank.

    A block is a LoRA of rank r / N: its scaling is alpha / (r / N), or for rsLoRA alpha / sqrt(r / N), the paper's
    alpha sqrt(N) / sqrt(r). So the file's alpha is N, or sqrt(N), times the plan's.
    """
    if lora.blocks == 1:
        return lora.alpha
    return lora.alpha * (math.sqrt(lora.blocks) if lora.rslora else lora.blocks)


def num_parameters(lora: LoraPlan, name: str, layer: nn.Linear) -> int:
    """In both factors of a layer, without the zeros between blocks."""
    side = block_side(name)
    inputs = layer.in_features // (lora.blocks if side == "a" else 1)
    outputs = layer.out_features // (lora.blocks if side == "b" else 1)
    return lora.rank * (inputs + outputs)


def undivided(lora: LoraPlan, layers: Mapping[str, nn.Linear]) -> str | None:
    """Why these layers cannot have this number of blocks; None if they can."""
    if lora.blocks == 1:
        return None
    if lora.vision:
        return (
            "not together with lora.vision: the vision side is not sharded, and PEFT selects block-diagonal layers by "
            "the last part of their names, which vision layers may have as well"
        )
    if lora.rank % lora.blocks:
        return f"{lora.blocks} blocks do not divide rank {lora.rank}; {next_multiple(lora.rank, lora.blocks)} works"
    for name, layer in layers.items():
        if wrong := undivided_layer(name, layer.in_features, layer.out_features, lora.blocks):
            return wrong
    return None


def undivided_layer(name: str, d_in: int, d_out: int, blocks: int) -> str | None:
    width, what = (d_in, "inputs") if block_side(name) == "a" else (d_out, "outputs")
    if block_side(name) is None or width % blocks == 0:
        return None
    return f"{blocks} blocks do not divide the {width} {what} of {name}; choose a divisor"


def next_multiple(rank: int, blocks: int) -> int:
    return -(-rank // blocks) * blocks
