"""The device of the oracle tests' engines; the oracle itself runs on the CPU."""

name = "cpu"
"""Set from `--device` before tests are collected, by `use`."""


def use(chosen: str) -> None:
    """Set the device. A GPU computes float32 products and convolutions of the tests without TF32.

    TF32 rounds operands to 10 bits of mantissa (3e-4 of a result), more than the oracle tests tolerate. torch uses it
    in cuDNN's convolutions unless it is switched off.
    """
    global name
    name = chosen
    if chosen.startswith("cuda"):
        import torch

        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
