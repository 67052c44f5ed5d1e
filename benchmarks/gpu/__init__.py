"""Stages of `vlora gpu-check` that need a checkout: one module each, with `run(context) -> dict`."""
