"""The bench of packed training: several adapters in one batch, beside plain PEFT."""
