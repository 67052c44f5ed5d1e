"""Training of LoRA adapters on the serving engine's weights: several adapters in one packed batch, in short pieces.

`PackedTrainer` holds the adapters. A micro-step computes the gradients of one packed batch and can be interrupted
between any two layers, so that a serving step may run there. `vlora.training.plan` reads plans, without torch.
"""
