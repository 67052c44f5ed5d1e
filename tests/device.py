"""The device of the oracle tests' engines; the oracle itself runs on the CPU."""

name = "cpu"
"""Set from `--device` before tests are collected."""
