"""Training of LoRA adapters on the serving engine's weights: several adapters in one packed batch, in short pieces.

`PackedTrainer` holds the adapters. A micro-step computes the gradients of one packed batch and can be interrupted
between any two layers, so that a serving step may run there. `vlora.training.plan` reads plans, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlora.lazy import attributes

if TYPE_CHECKING:
    from vlora.training.adapter import LoraSettings, TrainableLora, Update
    from vlora.training.batch import Sample
    from vlora.training.micro_step import Loss, MicroStep
    from vlora.training.trainer import PackedTrainer

__all__ = ["LoraSettings", "Loss", "MicroStep", "PackedTrainer", "Sample", "TrainableLora", "Update"]

__getattr__ = attributes(
    __name__,
    LoraSettings="vlora.training.adapter",
    Loss="vlora.training.micro_step",
    MicroStep="vlora.training.micro_step",
    PackedTrainer="vlora.training.trainer",
    Sample="vlora.training.batch",
    TrainableLora="vlora.training.adapter",
    Update="vlora.training.adapter",
)
