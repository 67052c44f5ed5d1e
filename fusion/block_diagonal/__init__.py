"""Block-diagonal adapters (BD-LoRA): layout, conversion of existing adapters, distillation."""
