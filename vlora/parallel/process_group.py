"""The ranks of one replica: their communication.

NCCL between GPUs, sockets on a CPU and for control messages. All ranks of a replica run on one machine; a process on
another one cannot join. The thread that needs the data reads and writes the sockets: with the threads of a collectives
library, waking them up takes nearly all of the time of small tensors (docs/decisions/0030). Every message begins with
its number, its size and its purpose, so that ranks that are out of sync fail at the first message that differs.
"""

from __future__ import annotations

import datetime
import itertools
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

HANG_S = 120  # a dead rank closes its sockets, and the others fail at once; this is for a live rank that hangs
_PIECE_BYTES = 48 * 1024
_HEAD = struct.Struct("<QQ16s")  # the message's number, the number of bytes that follow, and their purpose
_ORDERS = "orders"

RankSockets = Mapping[int, socket.socket]
"""A rank's ends of the sockets to each other rank, by that rank."""


class CollectiveFailed(RuntimeError):
    """Ranks cannot continue: one is dead, hangs, or sent an unexpected message."""


class RankDead(CollectiveFailed):
    """Another rank is dead: its end is the cause of this error."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")


def connect(size: int) -> list[dict[int, socket.socket]]:
    """Create sockets between `size` ranks; returns the ends of each rank.

    They are created before the ranks, so that ranks need no discovery: a socket to a rank that is still loading is
    open, and one to a dead rank is closed, no matter when it died. The caller must close the ends that it has passed
    on.
    """
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        ends[one][other], ends[other][one] = socket.socketpair()
    return ends


class SocketCollectives:
    """One socket between any two ranks. All ranks make the same calls in the same order.

    Raises CollectiveFailed if they do not, if another rank is dead, or if it has sent nothing for two minutes.
    """

    def __init__(self, rank: int, sockets: RankSockets) -> None:
        """Wait until all ranks are connected, without a timeout while they live."""
        self.rank = rank
        self.size = len(sockets) + 1
        self._others = dict(sockets)
        self._number = 0
        # The kernel's own timeouts on a call: a socket timeout in Python would need two system calls each.
        limit = struct.pack("ll", HANG_S, 0)
        for sock in self._others.values():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._piece = min(_piece_of(sock) for sock in self._others.values())
        self._head = bytearray(_HEAD.size)  # of the message being read
        self._piece = int(self.exchange(torch.tensor(self._piece), "piece", timeout=False).min())

    def close(self) -> None:
        for sock in self._others.values():
            sock.close()

    # -- tensors ------------------------------------------------------------------------------------------------------

    def exchange(self, tensor: torch.Tensor, purpose: str, *, timeout: bool = True) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's contiguous CPU tensor, in rank order.

        Every rank sends before it reads, one piece at a time. At most two pieces are sent and unread: to send a third,
        a rank must have read the other's second, which the other sends after reading the first. So no buffer fills up
        (`_piece_of`), and the exchange cannot deadlock.

        Args:
            purpose: Up to 16 letters, the same on all ranks.
            timeout: Whether another rank that sends nothing for two minutes is an error.
        """
        out = tensor.new_empty(self.size, *tensor.shape)
        out[self.rank] = tensor
        rows = [memoryview(row) for row in out.view(self.size, tensor.numel()).view(torch.uint8).numpy()]
        own = rows[self.rank]
        head = self._next_head(len(own), purpose)
        for other, sock in self._others.items():
            self._send_first(other, sock, head, own[: self._piece])
        for other, sock in self._others.items():
            if not timeout:
                _wait(sock)
            self._receive_first(other, sock, head, rows[other][: self._piece])
        for start in range(self._piece, len(own), self._piece):
            piece = slice(start, start + self._piece)
            for other, sock in self._others.items():
                self._send(other, sock, own[piece])
            for other, sock in self._others.items():
                self._receive(other, sock, rows[other][piece])
        return out

    # -- messages of rank 0 -------------------------------------------------------------------------------------------

    def broadcast(self, data: bytes) -> None:
        """Rank 0: send to every other rank, for its `receive`."""
        message = self._next_head(len(data), _ORDERS) + data
        for other, sock in self._others.items():
            self._send(other, sock, message)

    def receive(self) -> bytes:
        """Any other rank: the next bytes from rank 0, without a timeout."""
        sock = self._others[0]
        _wait(sock)
        self._receive(0, sock, memoryview(self._head))
        _, size, _ = _HEAD.unpack(self._head)
        self._check(0, self._next_head(size, _ORDERS))
        data = bytearray(size)
        self._receive(0, sock, memoryview(data))
        return bytes(data)

    # -- heads --------------------------------------------------------------------------------------------------------

    def _next_head(self, num_bytes: int, purpose: str) -> bytes:
        self._number += 1
        return _HEAD.pack(self._number, num_bytes, purpose.encode())

    def _check(self, other: int, wanted: bytes) -> None:
        """Raises CollectiveFailed unless the head from `other` equals the one that this rank would have sent."""
        if self._head != wanted:
            raise CollectiveFailed(
                f"ranks out of sync: rank {other} sent {_describe(self._head)}, but rank {self.rank} expects "
                f"{_describe(wanted)}"
            )

    # -- one socket ---------------------------------------------------------------------------------------------------

    def _send(self, other: int, sock: socket.socket, data: bytes | memoryview) -> None:
        try:
            sock.sendall(data)
        except ConnectionError as error:
            raise RankDead(other) from error
        except OSError as error:
            raise CollectiveFailed(f"rank {other} does not receive from rank {self.rank}: {error}") from error

    def _send_first(self, other: int, sock: socket.socket, head: bytes, data: memoryview) -> None:
        try:
            sent = sock.sendmsg((head, data))
        except OSError:
            sent = 0  # the next send raises the error
        if sent < len(head) + len(data):
            self._send(other, sock, (head + data)[sent:])

    def _receive_first(self, other: int, sock: socket.socket, head: bytes, into: memoryview) -> None:
        """A head, which must be `head`, and the data after it: nearly always in one call."""
        try:
            # Without MSG_WAITALL: the rest of a message that is shorter than expected would never arrive.
            count = sock.recvmsg_into((self._head, into))[0]
        except OSError as error:
            raise self._receive_error(other, error) from error
        if count == len(head) + len(into) and self._head == head:
            return
        if not count:
            raise RankDead(other)
        self._receive(other, sock, memoryview(self._head)[count:])
        self._check(other, head)
        self._receive(other, sock, into[max(0, count - len(head)) :])

    def _receive(self, other: int, sock: socket.socket, into: memoryview) -> None:
        try:
            while into:  # once, unless a signal interrupts it
                count = sock.recv_into(into, len(into), socket.MSG_WAITALL)
                if not count:
                    raise RankDead(other)
                into = into[count:]
        except OSError as error:
            raise self._receive_error(other, error) from error

    def _receive_error(self, other: int, error: OSError) -> CollectiveFailed:
        if isinstance(error, ConnectionError):
            return RankDead(other)
        return CollectiveFailed(f"rank {self.rank} received nothing from rank {other}: {error}")


def _describe(head: bytes | bytearray) -> str:
    number, num_bytes, purpose = _HEAD.unpack_from(head)
    return f"message {number} ({purpose.rstrip(bytes(1)).decode(errors='replace')}, {num_bytes} bytes)"


def _piece_of(sock: socket.socket) -> int:
    """The bytes of a piece, two of which fit into the socket's buffer with the kernel's overhead.

    Half of the buffer is for the overhead: Linux doubles the requested size. It grants less if its own limit
    (net.core.wmem_max) is lower, so the granted size counts.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _PIECE_BYTES)
    return min(_PIECE_BYTES, sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4)


def _wait(sock: socket.socket) -> None:
    """Until there is data to read, or the other end is closed."""
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    waiting.poll()


Cause = Literal["base", "slora", "orders", "images", "start"]
"""The reason of a collective: the base model's sums, S-LoRA adapters' products, rank 0's orders, failed images,
start.
"""


class ProcessGroup(SocketCollectives):
    """This process among the ranks of its replica. Created on all ranks at once; every call is made by all ranks.

    A call raises CollectiveFailed if another rank is dead or makes a different call; NCCL raises RuntimeError for its
    own errors.
    """

    def __init__(self, rank: int, sockets: RankSockets, device: torch.device, store_file: str = "") -> None:
        """Wait until all ranks are connected.

        Args:
            store_file: Where NCCL's ranks meet, used as long as the group lives; visible only to the ranks.
        """
        super().__init__(rank, sockets)
        self.device = device
        self._nccl: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            store, hang = dist.FileStore(store_file, self.size), datetime.timedelta(seconds=HANG_S)
            store.set_timeout(hang)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = hang  # noqa: SLF001  (torch)
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
        first, second, *others = self.exchange(tensor, f"sum {cause}")
        torch.add(first, second, out=tensor)
        for other in others:
            tensor += other
        return tensor

    def all_gather(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's tensor, in rank order."""
        tensor = tensor.contiguous()
        if self._nccl is None:
            return self.exchange(tensor, f"gather {cause}")
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
        super().close()

    # -- control ------------------------------------------------------------------------------------------------------

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this, without a timeout."""
        self.smallest([0], "start")

    def smallest(self, values: Sequence[int], cause: Cause) -> list[int]:
        """The minimum of each value over ranks, without a timeout because some may still be loading."""
        tensor = torch.tensor(values, dtype=torch.int64)
        return self.exchange(tensor, f"least {cause}", timeout=False).amin(0).tolist()
