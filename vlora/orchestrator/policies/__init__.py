"""Scheduling policies: V-LoRA's Algorithm 1, the cost-based default, dLoRA, and two baselines."""
