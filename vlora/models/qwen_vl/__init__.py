"""Qwen-VL of the first generation (arXiv:2308.12966). Its published checkpoints come with their own code.

That code is never run. The checkpoints are read in their own layout into a model with transformers' Qwen2 decoder.
"""
