"""Training of LoRA adapters on the serving engine's weights: several adapters in one packed batch, in short pieces.

`PackedTrainer` holds the adapters. A micro-step computes the gradients of one packed batch and can be interrupted
between any two layers, so that a serving step may run there.
"""

from vlora.training.adapter import LoraSettings, TrainableLora, Update
from vlora.training.batch import Sample
from vlora.training.micro_step import Loss, MicroStep
from vlora.training.trainer import PackedTrainer

__all__ = ["LoraSettings", "Loss", "MicroStep", "PackedTrainer", "Sample", "TrainableLora", "Update"]
