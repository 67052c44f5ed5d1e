"""V-LoRA: one vision-language model, many LoRA adapters, one box."""
