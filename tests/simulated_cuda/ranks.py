"""Ranks of tensor parallelism on the simulated device: a process and a device each, and gloo in place of NCCL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.simulated_cuda.counts import Kind
from tests.simulated_cuda.streams import count
from tests.simulated_cuda.tensor import CUDA, DeviceMismatch, SimulatedTensor
from vlora.engine.tensor_parallel import worker
from vlora.models import loading
from vlora.parallel.process_group import RankSockets

_plain_main = worker.main


def main(link: Any, sockets: RankSockets) -> None:
    """`worker.main` on the simulated device. Each process sees its own device only, as `cuda:0`."""
    from tests.simulated_cuda.install import simulated_cuda

    with (
        simulated_cuda(),
        mock.patch.object(worker, "device_of", lambda config, rank: CUDA),
        mock.patch.object(loading, "device_of", lambda config, rank: CUDA),
    ):
        _plain_main(link, sockets)


class SimulatedNCCL:
    """The part of `torch.distributed.ProcessGroupNCCL` that ranks use: collectives of tensors on the device."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return self._gloo.allreduce(_launched("all_reduce", tensors))

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> Any:
        (parts,) = outputs
        *parts, own = _launched("all_gather", [*parts, *tensors])
        return self._gloo.allgather([parts], [own])

    def abort(self) -> None:
        pass


def _launched(name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The values of the tensors of a collective, which counts as one launch."""
    backings = [tensor.backing for tensor in tensors if isinstance(tensor, SimulatedTensor)]
    if len(backings) < len(tensors):
        raise DeviceMismatch(f"{name}: tensors on the host among {[tuple(tensor.shape) for tensor in tensors]}")
    count(Kind.LAUNCH, f"nccl {name}")
    return backings
