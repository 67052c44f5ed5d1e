"""The share of an adapter that survives merging, measured when the adapter is read, beside the running steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from atmm.quantized import QuantizedWeight
from vlora.lora.base_weights import BaseWeights
from vlora.lora.layout import HostFactors
from vlora.lora.merge import merge_runs
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.host_to_device import SideStream

# Sampled values of W0 per batch. On a CPU a batch stays in the second-level cache. On a GPU there are few batches, and
# the temporary float32 tensors of one take 300 MiB together, of the memory that is left for activations.
_CPU_VALUES, _GPU_VALUES = 2**16, 2**24
SLOT_BYTES = 8 * 2**20  # of one pinned buffer: the factors of a batch


class MergeFidelity:
    """Computes 1 - |round(W0 + d) - W0 - d| / |d| over all language-model layers, on evenly spaced rows.

    1.0 is lossless. An adapter without language-model layers has 1.0, since merging it changes nothing. Thread-safe.

    On a GPU nothing is launched on the stream of the steps and nothing waits for it: layers of one shape are computed
    in batches on another stream, and one copy returns the result.
    """

    def __init__(
        self,
        slabs: WeightSlabs,
        base_weights: BaseWeights | None = None,
        stream: SideStream | None = None,
        num_rows: int = 64,
    ) -> None:
        """Create the measure.

        Args:
            base_weights: W0 in host memory, for slabs that merged weights overwrite; None if the slabs always hold W0.
            stream: A separate stream of the slabs' GPU, which computes; None computes on the CPU.
            num_rows: Approximate number of sampled rows per layer.
        """
        self._slabs = slabs
        self._base_weights = base_weights
        self._num_rows = num_rows
        self._lock = threading.Lock()
        self._upload = None if stream is None else _Upload(stream, slabs.base[0].device)

    @torch.no_grad()
    def __call__(self, factors: Mapping[str, HostFactors]) -> float:
        """factors: the adapter's dense or rescaled factors by layer, in host memory."""
        upload = self._upload
        with self._lock, contextlib.nullcontext() if upload is None else upload.stream.current():
            norms = [self._norms(batch, factors) for batch in self._batches(factors)]
            if not norms:
                return 1.0
            both = torch.stack(norms).double().square().sum(0)
            lost, total = (both if upload is None else upload.fetch(both)).tolist()
        return 1.0 if total == 0 else max(0.0, 1.0 - (lost / total) ** 0.5)

    def _batches(self, factors: Mapping[str, HostFactors]) -> Iterator[_Batch]:
        """Neighbouring layers of one shape and rank, as many as fit into memory."""
        for run in merge_runs(self._slabs, {name: (len(pair.a), len(pair.bt)) for name, pair in factors.items()}):
            _, d_out, d_in = self._slabs.base[run.slab].shape
            step = max(1, d_out // self._num_rows)
            rows = -(-d_out // step)
            size = (_CPU_VALUES if self._upload is None else _GPU_VALUES) // (rows * d_in)
            if self._upload is not None:
                pair = factors[run.names[0]]
                values = d_in * len(pair.a) + rows * len(pair.bt)
                size = min(size, SLOT_BYTES // (values * pair.a.element_size() or 1))
            size = max(1, size)
            for start in range(0, len(run.names), size):
                names = run.names[start : start + size]
                yield _Batch(run.slab, run.first + start, names, step)

    def _norms(self, batch: _Batch, factors: Mapping[str, HostFactors]) -> torch.Tensor:
        """[2]: the norms of the part of the delta that is lost, and of the delta, in float32."""
        rows = self._base_rows(batch)
        pairs = [factors[name] for name in batch.names]
        sampled = [pair.a for pair in pairs], [pair.bt[:, :: batch.step] for pair in pairs]
        a, bt = map(torch.stack, sampled) if self._upload is None else self._upload.stack(sampled)
        # The difference is computed in float32, which is sufficient for 16-bit W0 and gives 1.0 within rounding for
        # float32 weights.
        rank = a.shape[1]
        delta = bt[:, :rank].float().transpose(1, 2) @ a.float()
        weight = rows.float()
        if bt.shape[1] > rank:  # rescaled: W0 + delta is multiplied by g, and bt has g - 1
            delta += bt[:, rank, :, None].float() * (weight + delta)
        exact = weight + delta
        merged = rows.rounded(exact) if isinstance(rows, QuantizedWeight) else exact.to(rows.dtype).float()
        lost = merged.sub_(weight).sub_(delta)
        return torch.stack([torch.linalg.vector_norm(lost), torch.linalg.vector_norm(delta)])

    def _base_rows(self, batch: _Batch) -> Any:
        """Every `step`th row of the batch's W0, whatever is merged: [layers, rows, in]."""
        if self._base_weights is not None:
            return torch.stack([self._base_weights.weight(name)[:: batch.step] for name in batch.names])
        return self._slabs.base[batch.slab][batch.first : batch.first + len(batch.names), :: batch.step]


class _Batch(NamedTuple):
    """Neighbouring layers of a slab: their entries start at `first`. step: distance of sampled rows."""

    slab: int
    first: int
    names: tuple[str, ...]
    step: int


class _Upload:
    """Copies factors to a GPU through two pinned buffers, and the result back. stream: runs the copies."""

    def __init__(self, stream: SideStream, device: torch.device) -> None:
        self.stream = stream
        self._device = device
        self._slots = [stream.pinned(SLOT_BYTES) for _ in range(2)]
        self._copied: list[Any] = [None, None]  # per slot: event of its last copy
        self._turn = 0
        self._result = stream.pinned(16).view(torch.float64)
        stream.wait(stream.mark_caller())  # for W0 in the slabs, which the caller has written

    def stack(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """`torch.stack` of each group of host tensors, on the GPU. One copy moves all groups."""
        self._turn = turn = 1 - self._turn
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        num_bytes = sum(tensor.nbytes for group in groups for tensor in group)
        if num_bytes > len(self._slots[turn]):  # a single layer of a very high rank
            self._slots[turn] = self.stream.pinned(num_bytes)
        slot = self._slots[turn][:num_bytes]
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        stacked, start = [], 0
        for group in groups:
            first = group[0]
            stop = start + len(group) * first.nbytes
            place = slot[start:stop].view(first.dtype).view(len(group), *first.shape)
            torch.stack(list(group), out=place)
            stacked.append(there[start:stop].view(first.dtype).view(place.shape))
            start = stop
        self._copied[turn] = self.stream.copy(there, slot)
        return stacked

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Two float64 values, in host memory."""
        self.stream.copy(self._result, values).synchronize()
        return self._result
