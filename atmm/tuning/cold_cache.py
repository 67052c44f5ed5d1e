"""Measuring as a model meets it: between two visits to a layer all of the base weights pass through the caches, and the
layer's factors come from memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.layers import SiteGroup
from atmm.strategies.registry import NEED_NO_COPY

_OWN_CACHES_BYTES = 4 * 2**20  # more than a core has to itself
_ALL_CACHES_BYTES = 256 * 2**20  # more than most machines have; only where lines cannot be evicted one by one
_NUM_ROWS, _WIDTH = 4, 1024


class Caches:
    """The caches of one device, and a base layer of one dtype to go through them."""

    def __init__(self, device: str | torch.device, dtype: torch.dtype) -> None:
        device = torch.device(device)
        kernels = library() if device.type == "cpu" else None
        self._evict = kernels.evict if kernels is not None and kernels.evict(None, 0) else None
        if device.type == "cuda":
            num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        else:
            num_bytes = _ALL_CACHES_BYTES if self._evict is None else _OWN_CACHES_BYTES
        self._rows = torch.ones(_NUM_ROWS, _WIDTH, dtype=dtype, device=device)
        self._weights = torch.ones(num_bytes // dtype.itemsize // _WIDTH, _WIDTH, dtype=dtype, device=device)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Leave nothing in them of these tensors' storages, and run the base layer."""
        if self._evict is not None:
            storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            for address, storage in storages.items():
                self._evict(address, storage.nbytes())
        torch.mm(self._rows, self._weights.t())


def factors_of(group: SiteGroup) -> list[Tensor]:
    """All that a group's deltas are computed from: its sites' factors and their packed copy."""
    return [*_own(group), *_copied(group)]


def read_by(strategy: str, group: SiteGroup) -> list[Tensor]:
    """What of that a strategy reads."""
    return _own(group) if strategy in NEED_NO_COPY else _copied(group)


def _own(group: SiteGroup) -> list[Tensor]:
    return [tensor for site in group.sites for factors in site.factors.values() for tensor in factors]


def _copied(group: SiteGroup) -> list[Tensor]:
    packed = group.packed
    return [] if packed is None else [packed.a, *packed.bts, *packed.bs]
