"""Compiled kernels at hand: launched as they are, without asking anew what they must be compiled for.

Triton's own launch looks at every argument each time, which takes longer than many a kernel runs (docs/decisions.md,
2026-11-22). Here the types are settled once, and of the arguments only what Triton compiles for is looked at: nearly
always all of them are multiples of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atmm.triton import kernels


class Handle:
    """One kernel with its compile-time sizes: `handle(grid, tensors, integers, *rest)`, in the kernel's order.

    grid: three numbers of programs. rest: what the kernel is the same for.
    """

    __slots__ = ("_kernel", "_made", "_options", "_sizes")

    def __init__(self, name: str, sizes: Mapping[str, Any], options: Mapping[str, int]) -> None:
        self._kernel = getattr(kernels, name)
        self._sizes, self._options = sizes, options
        self._made: dict[tuple, Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], integers: tuple[int, ...], *rest: Tensor | float
    ) -> None:
        addresses = numbers = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        for number in integers:
            numbers |= number
        usual = (addresses | numbers) % 16 == 0 and numbers < 2**31
        key = () if usual else (*(tensor.data_ptr() % 16 == 0 for tensor in tensors), *map(_kind, integers))
        made = self._made.get(key)
        if made is not None:
            made[grid](*tensors, *integers, *rest, *self._sizes.values())
            return
        made = self._kernel[grid](*tensors, *integers, *rest, **self._sizes, **self._options)
        if made is not None:  # the interpreter compiles nothing
            self._made[key] = made


@functools.cache
def handle(
    name: str, dtype: torch.dtype, device: torch.device, sizes: tuple[tuple[str, Any], ...], **options: int
) -> Handle:
    """The one handle of a kernel of `atmm.triton.kernels` for a type of values, a device and its sizes, these in the
    order the kernel declares them.

    options: num_warps and num_stages; absent ones are Triton's defaults.
    """
    return Handle(name, dict(sizes), options)


def _kind(number: int) -> tuple[bool, bool, bool]:
    """What Triton compiles for, of a number: whether it is 1, a multiple of 16, too wide for 32 bits."""
    return number == 1, number % 16 == 0, number >= 2**31
