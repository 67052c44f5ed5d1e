"""One shrink for all sites of a group, computed at the first site and kept until the last site has used it."""

from __future__ import annotations

from torch import Tensor

from atmm.layers import Packed
from atmm.segments import BatchStats, Strategy


class CachedInput:
    """The input of a cached result. The reference prevents torch from reusing its memory for another tensor.

    Callers pass a new view at every call. It is compared by memory, shape and strides and, where torch counts writes,
    by version.
    """

    __slots__ = ("_version", "_x")

    def __init__(self) -> None:
        self._x: Tensor | None = None
        self._version: int | None = None

    def set(self, x: Tensor) -> None:
        self._x = x
        self._version = None if x.is_inference() else x._version  # noqa: SLF001  (torch)

    def clear(self) -> None:
        self._x = None

    def matches(self, x: Tensor) -> bool:
        held = self._x
        # `is_set_to` would be an operation of torch, with which a `Tape` cannot repeat a step.
        if held is None or _place(x) != _place(held):
            return False
        return self._version is None or self._version == x._version  # noqa: SLF001  (torch)


def _place(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.device, x.dtype, x.shape, x.stride()


class SharedShrink(Strategy):
    """Base of strategies with a group-wide shrink: the first site called computes the shares of all sites.

    The shares are valid for one packed copy and one input, and each share is used once.
    """

    __slots__ = ("_cached_input", "_live", "_lone", "_packed", "_part", "_shares")

    def __init__(self, stats: BatchStats) -> None:
        self._part = stats.part
        self._live = stats.live
        self._lone = len(stats.layout.widths) == 1
        self._shares: dict[int, Tensor] = {}  # by site, for the sites not called yet
        self._packed: Packed | None = None
        self._cached_input = CachedInput()

    def _share(self, x: Tensor, index: int, packed: Packed) -> Tensor | None:
        """The site's share, from which it adds its deltas; None if no lane's adapter targets the site."""
        if self._lone:
            return self._compute(x, packed)[0]
        if index not in self._live:
            return None
        share = self._shares.pop(index, None)
        if share is None or packed is not self._packed or not self._cached_input.matches(x):
            self._shares = self._compute(x, packed)
            self._packed = packed
            self._cached_input.set(x)
            share = self._shares.pop(index)
        if not self._shares:
            self._packed = None
            self._cached_input.clear()
        return share

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        raise NotImplementedError
