"""The ranks of one replica: their communication.

NCCL between GPUs, sockets on a CPU and for control messages (`socket_collectives.py`). All ranks of a replica run on
one machine; a process on another one cannot join.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from vlora.parallel.socket_collectives import RankSockets, SocketCollectives

Cause = Literal["base", "slora", "orders", "images", "start"]
"""The reason of a collective: the base model's sums, S-LoRA adapters' products, rank 0's orders, failed images,
start.
"""

# The death of a rank ends the other ranks' waits at once (`abort`). This limit is for a live rank that hangs.
_HANG = datetime.timedelta(seconds=120)


class ProcessGroup:
    """This process among the ranks of its replica. Created on all ranks at once; every call is made by all ranks.

    A call raises CollectiveFailed if another rank is dead or makes a different call; NCCL raises RuntimeError for its
    own errors.
    """

    def __init__(self, rank: int, sockets: RankSockets, device: torch.device, store_file: str = "") -> None:
        """Wait until all ranks are connected.

        Args:
            store_file: Where NCCL's ranks meet, used as long as the group lives; visible only to the ranks.
        """
        self.rank = rank
        self.size = len(sockets) + 1
        self.device = device
        self._sockets = SocketCollectives(rank, sockets)
        self._nccl: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            store = dist.FileStore(store_file, self.size)
            store.set_timeout(_HANG)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _HANG  # noqa: SLF001  (torch)
            self._nccl = dist.ProcessGroupNCCL(store, rank, self.size, options)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which schedules and samples."""
        return self.rank == 0

    def all_reduce(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        """Sum over ranks, in place if the tensor is contiguous; returns it. Bitwise equal on all ranks."""
        tensor = tensor.contiguous()
        if self._nccl is not None:
            self._nccl.allreduce([tensor]).wait()
            return tensor
        first, second, *others = self._sockets.exchange(tensor, f"sum {cause}")
        torch.add(first, second, out=tensor)
        for other in others:
            tensor += other
        return tensor

    def all_gather(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's tensor, in rank order."""
        tensor = tensor.contiguous()
        if self._nccl is None:
            return self._sockets.exchange(tensor, f"gather {cause}")
        out = tensor.new_empty(self.size, *tensor.shape)
        self._nccl.allgather([list(out.unbind(0))], [tensor]).wait()
        return out

    def abort(self) -> None:
        """End all waits for a dead rank, from any thread. This rank's results are invalid afterwards.

        On a CPU closed sockets have ended them already; NCCL's kernels would wait until their timeout.
        """
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        """Close without waiting for other ranks, which may be dead (NCCL included)."""
        self.abort()
        self._nccl = None
        self._sockets.close()

    # -- control ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Rank 0: send these bytes to all others, for their `receive`."""
        self._sockets.broadcast(data)

    def receive(self) -> bytes:
        """Any other rank: the next bytes from rank 0, without a timeout."""
        return self._sockets.receive()

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this, without a timeout."""
        self.smallest([0], "start")

    def smallest(self, values: Sequence[int], cause: Cause) -> list[int]:
        """The minimum of each value over ranks, without a timeout because some may still be loading."""
        tensor = torch.tensor(values, dtype=torch.int64)
        return self._sockets.exchange(tensor, f"least {cause}", timeout=False).amin(0).tolist()
