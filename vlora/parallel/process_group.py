"""The ranks of one replica: what they say to each other, and the books of what it cost.

NCCL between GPUs, sockets on a CPU and for control messages (`socket_collectives.py`). All ranks of a replica run on
one machine; no process on another one can join.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from vlora.parallel.socket_collectives import Ends, Lines

Cause = Literal["base", "slora", "orders", "images", "start"]
"""Why ranks talk: the base model's own sums, S-LoRA adapters' products, rank 0's orders, images that failed, start."""

# A rank that dies ends what the others wait for, at once (`abort`). This is for one that lives and hangs.
_HANG = datetime.timedelta(seconds=120)


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

    A call raises RanksApart when another rank is gone, or does something else; NCCL's RuntimeErrors where it says so.
    """

    def __init__(self, rank: int, ends: Ends, device: torch.device, store_file: str = "") -> None:
        """Wait until all ranks are here. ends: of the lines to the others. device: this rank's. store_file: where NCCL
        meets, and looks as long as the group lives; all ranks see it, and nobody else."""
        self.rank = rank
        self.size = len(ends) + 1
        self.device = device
        self.ledger = Ledger()
        self._lines = Lines(rank, ends)
        self._nccl: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            store = dist.FileStore(store_file, self.size)
            store.set_timeout(_HANG)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _HANG
            self._nccl = dist.ProcessGroupNCCL(store, rank, self.size, options)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides and samples."""
        return self.rank == 0

    def all_reduce(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        """Sum over ranks, in place where the tensor is contiguous; returns it. Alike on all ranks, to the bit."""
        tensor = tensor.contiguous()
        self.ledger.note("all_reduce", cause, tensor.nbytes)
        if self._nccl is not None:
            self._nccl.allreduce([tensor]).wait()
            return tensor
        first, second, *others = self._lines.exchange(tensor, f"sum {cause}")
        torch.add(first, second, out=tensor)
        for other in others:
            tensor += other
        return tensor

    def all_gather(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's tensor, in the order of ranks."""
        tensor = tensor.contiguous()
        self.ledger.note("all_gather", cause, tensor.nbytes)
        if self._nccl is None:
            return self._lines.exchange(tensor, f"gather {cause}")
        out = tensor.new_empty(self.size, *tensor.shape)
        self._nccl.allgather([list(out.unbind(0))], [tensor]).wait()
        return out

    def abort(self) -> None:
        """From any thread: end what waits for a rank that is gone. Whatever this rank computes is worthless then.

        On a CPU sockets that close have ended it already; NCCL's kernels would wait until their timeout.
        """
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        """Nobody says anything more. Nor does NCCL wait for anybody, who may be gone by now."""
        self.abort()
        self._nccl = None
        self._lines.close()

    # -- control ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Rank 0: give all others these bytes, for their `receive`."""
        self.ledger.note("broadcast", "orders", len(data))
        self._lines.tell(data)

    def receive(self) -> bytes:
        """Any other rank: what rank 0 sends next, however long it takes."""
        data = self._lines.hear()
        self.ledger.note("broadcast", "orders", len(data))
        return data

    def wait_for_all(self) -> None:
        """Wait until all ranks have got here, however long it takes them."""
        self.smallest([0], "start")

    def smallest(self, values: Sequence[int], cause: Cause) -> list[int]:
        """The smallest of each value over ranks, the slowest of which may still be loading."""
        tensor = torch.tensor(values, dtype=torch.int64)
        self.ledger.note("all_reduce", cause, tensor.nbytes)
        return self._lines.exchange(tensor, f"least {cause}", patient=True).amin(0).tolist()
