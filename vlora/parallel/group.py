"""The ranks of one replica: what they say to each other, and the books of what it cost.

Gloo on a CPU, NCCL between GPUs. Control messages and sizes always go over gloo, on the loopback device: a replica is
one box, and nobody outside it can join.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

Cause = Literal["base", "slora", "orders", "images", "start"]
"""Why ranks talk: the base model's own sums, S-LoRA adapters' products, rank 0's orders, images that failed, start."""

# A rank that dies closes its connections, and the others fail at once. This is for one that lives and hangs.
_HANG = datetime.timedelta(seconds=120)
_IDLE = datetime.timedelta(days=365)  # how long the others wait for rank 0's orders
_FIRST_BYTES = 16 * 1024  # orders up to this size take one broadcast: a step of a few hundred requests


@dataclasses.dataclass
class Entry:
    """num_bytes: what one rank handed in, summed over calls."""

    calls: int = 0
    num_bytes: int = 0


class Ledger:
    """Collectives by kind and cause since the last `take`."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, Cause], Entry] = {}

    def note(self, kind: str, cause: Cause, num_bytes: int) -> None:
        entry = self._entries.setdefault((kind, cause), Entry())
        entry.calls += 1
        entry.num_bytes += num_bytes

    def take(self) -> dict[tuple[str, Cause], Entry]:
        """What was noted since the last call, by (all_reduce | all_gather | broadcast, cause)."""
        entries, self._entries = self._entries, {}
        return entries


class Group:
    """This process among the ranks of its replica. Made by all ranks at once; every call is made by all of them.

    A call raises RuntimeError when another rank is gone.
    """

    def __init__(self, folder: str, rank: int, size: int, device: torch.device) -> None:
        """folder: an empty one that all ranks see, and nobody else."""
        self.rank = rank
        self.size = size
        self.ledger = Ledger()
        store = dist.FileStore(f"{folder}/ranks", size)
        store.set_timeout(_HANG)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _HANG
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        self._compute: Any = self._gloo
        if device.type == "cuda":
            torch.cuda.set_device(device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _HANG
            self._compute = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides and samples."""
        return self.rank == 0

    def all_reduce(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        """Sum over ranks, in place where the tensor is contiguous; returns it."""
        tensor = tensor.contiguous()
        self.ledger.note("all_reduce", cause, tensor.nbytes)
        self._compute.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's tensor, in the order of ranks."""
        self.ledger.note("all_gather", cause, tensor.nbytes)
        out = tensor.new_empty(self.size, *tensor.shape)
        self._compute.allgather([list(out.unbind(0))], [tensor.contiguous()]).wait()
        return out

    def abort(self) -> None:
        """From any thread: end what waits for a rank that is gone. Whatever this rank computes is worthless then.

        Over gloo connections that close have ended it already; NCCL's kernels would wait until their timeout.
        """
        if self._compute is not self._gloo:
            self._compute.abort()

    # -- control ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Rank 0: give all others these bytes, for their `receive`. One broadcast, or two when they are many."""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        head = len(data).to_bytes(8, "little") + data[: _FIRST_BYTES - 8]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(first)
        rest = data[_FIRST_BYTES - 8 :]
        if rest:
            self._broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Any other rank: what rank 0 sends next, however long it takes."""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        self._broadcast(first)
        head = first.numpy().tobytes()
        length = int.from_bytes(head[:8], "little")
        data = head[8 : 8 + length]
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._broadcast(rest)
            data += rest.numpy().tobytes()
        return data

    def smallest(self, values: Sequence[int], cause: Cause) -> list[int]:
        """The smallest of each value over ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        self.ledger.note("all_reduce", cause, tensor.nbytes)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.timeout = _IDLE  # the slowest rank may still be loading
        self._gloo.allreduce([tensor], options).wait()
        return tensor.tolist()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self.ledger.note("broadcast", "orders", tensor.nbytes)
        self._gloo.broadcast([tensor], _from_rank_0()).wait()


@functools.cache
def _from_rank_0() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = _IDLE
    return options
