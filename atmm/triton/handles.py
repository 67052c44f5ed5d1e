"""Handles of compiled kernels, which launch them without Triton's argument specialization.

Triton's launch inspects every argument at each call, which takes longer than many kernels run (docs/decisions/0009).
A handle fixes the types once and inspects only the argument properties that Triton specializes on. Nearly
always all arguments are multiples of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atmm.triton import kernels, weight_kernels
from atmm.triton.tiling import LEAST_SHARED, SHARED_BYTES

KERNELS: Mapping[str, Any] = {**vars(kernels), **vars(weight_kernels)}


class Handle:
    """One kernel with its compile-time sizes: `handle(grid, tensors, integers, *rest)`, in the kernel's order.

    grid: number of programs in three dimensions. rest: arguments that Triton does not specialize on.
    """

    __slots__ = ("_kernel", "_made", "_options", "_sizes")

    def __init__(self, name: str, sizes: Mapping[str, Any], options: Mapping[str, int]) -> None:
        self._kernel = KERNELS[name]
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
    """The shared handle of one of `KERNELS` for a dtype, a device and compile-time sizes.

    sizes: in the order in which the kernel declares them. options: num_warps and num_stages; default: Triton's.
    """
    return Handle(name, dict(sizes), options)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; without one, those of an H100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The most shared memory of a block; of an unknown GPU, the least of the known ones."""
    if device.type != "cuda":
        return SHARED_BYTES[8, 0]
    return SHARED_BYTES.get(torch.cuda.get_device_capability(device), LEAST_SHARED)


def _kind(number: int) -> tuple[bool, bool, bool]:
    """The properties of an integer that Triton specializes on: 1, a multiple of 16, wider than 32 bits."""
    return number == 1, number % 16 == 0, number >= 2**31
