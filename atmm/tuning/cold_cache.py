"""Cache control for measurements under model conditions: between two calls of a layer all base weights pass through the
caches, so that the layer's factors are read from memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.layers import SiteGroup
from atmm.strategies.registry import NEED_NO_COPY

_OWN_CACHES_BYTES = 4 * 2**20  # more than the private caches of a core
_ALL_CACHES_BYTES = 256 * 2**20  # more than all caches of most machines; used if single lines cannot be evicted
_NUM_ROWS, _WIDTH = 4, 1024


class DeviceCaches:
    """The caches of one device, and a base layer of one dtype to displace their contents."""

    def __init__(self, device: str | torch.device, dtype: torch.dtype) -> None:
        device = torch.device(device)
        kernels = library() if device.type == "cpu" else None
        self._evict_lines = kernels.evict if kernels is not None and kernels.evict(None, 0) else None
        if device.type == "cuda":
            num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        else:
            num_bytes = _ALL_CACHES_BYTES if self._evict_lines is None else _OWN_CACHES_BYTES
        self._rows = torch.ones(_NUM_ROWS, _WIDTH, dtype=dtype, device=device)
        self._weights = torch.ones(num_bytes // dtype.itemsize // _WIDTH, _WIDTH, dtype=dtype, device=device)

    def evict(self, tensors: Iterable[Tensor]) -> None:
        """Evict the storages of these tensors from the caches, and run the base layer."""
        if self._evict_lines is not None:
            storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            for address, storage in storages.items():
                self._evict_lines(address, storage.nbytes())
        torch.mm(self._rows, self._weights.t())


def factors_of(group: SiteGroup) -> list[Tensor]:
    """All inputs of a group's deltas: the factors of its sites and their packed copy."""
    return [*_own(group), *_copied(group)]


def read_by(strategy: str, group: SiteGroup) -> list[Tensor]:
    """The subset of `factors_of` that a strategy reads."""
    return _own(group) if strategy in NEED_NO_COPY else _copied(group)


def _own(group: SiteGroup) -> list[Tensor]:
    return [tensor for site in group.sites for factors in site.factors.values() for tensor in factors]


def _copied(group: SiteGroup) -> list[Tensor]:
    packed = group.packed
    return [] if packed is None else [packed.a, *packed.bts, *packed.bs]
