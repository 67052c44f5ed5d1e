"""Accuracy-aware packing of domains into adapters (V-LoRA section 4.2)."""
