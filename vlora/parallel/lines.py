"""Sockets between the ranks of one box, read and written by the very thread that needs what they carry.

A library of collectives hands each of them to a thread of its own, whose sockets yet another thread watches. With
tensors of a few kilobytes, as a step that decodes has them, nearly all of its time goes into waking threads one after
the other (docs/decisions.md, 2026-11-22). Here only a rank that came early is woken, once.
"""

from __future__ import annotations

import select
import socket
import struct
import time

import torch

_HANG_S = 120  # a rank that dies closes its sockets, and the others fail at once; this is for one that lives and hangs
_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 48 * 1024  # two of them fit into a socket's buffer as Linux makes it, with what it keeps around them


class Lines:
    """One socket between any two ranks. All ranks make the same calls in the same order.

    Raises RuntimeError when another rank is gone, or has said nothing for two minutes.
    """

    def __init__(self, folder: str, rank: int, size: int) -> None:
        """Meet the others in a folder that all ranks see, and nobody else."""
        self._rank = rank
        self._size = size
        self._others: dict[int, socket.socket] = {}
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(f"{folder}/rank-{rank}")
                door.listen(size)
                door.settimeout(_HANG_S)
                for other in range(rank):
                    self._others[other] = _reach(f"{folder}/rank-{other}")
                    self._others[other].sendall(_LENGTH.pack(rank))
                for _ in range(rank + 1, size):
                    line, _ = door.accept()
                    (other,) = _LENGTH.unpack(line.recv(_LENGTH.size, socket.MSG_WAITALL))
                    self._others[other] = line
        except (OSError, struct.error) as error:
            self.close()
            raise RuntimeError(f"rank {rank} does not reach the others: {error}") from error
        # The system's own limits on a call: a socket's timeout in Python would make two of each.
        limit = struct.pack("ll", _HANG_S, 0)
        for line in self._others.values():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def close(self) -> None:
        for line in self._others.values():
            line.close()

    # -- tensors ------------------------------------------------------------------------------------------------------

    def exchange(self, tensor: torch.Tensor, *, patient: bool = False) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's contiguous tensor on a CPU, in the order of ranks.

        patient: others may take as long as they like to get here.

        Everybody sends before reading, a piece at a time. What a rank has sent and another has not read are two pieces
        at most: to send a third, it must have read the second of the other's, who sends that after reading the first.
        So no buffer fills up, and nobody waits to be read by one who waits likewise.
        """
        out = tensor.new_empty(self._size, *tensor.shape)
        out[self._rank] = tensor
        rows = [memoryview(row) for row in out.view(self._size, tensor.numel()).view(torch.uint8).numpy()]
        own = rows[self._rank]
        for start in range(0, len(own), _PIECE_BYTES):
            piece = slice(start, start + _PIECE_BYTES)
            for other, line in self._others.items():
                self._send(other, line, own[piece])
            for other, line in self._others.items():
                if patient:
                    _wait(line)
                self._receive(other, line, rows[other][piece])
        return out

    # -- rank 0's words -----------------------------------------------------------------------------------------------

    def tell(self, data: bytes) -> None:
        """Rank 0: to every other rank, for its `hear`."""
        message = _LENGTH.pack(len(data)) + data
        for other, line in self._others.items():
            self._send(other, line, memoryview(message))

    def hear(self) -> bytes:
        """Any other rank: what rank 0 tells next, however long it takes to."""
        line = self._others[0]
        _wait(line)
        head = bytearray(_LENGTH.size)
        self._receive(0, line, memoryview(head))
        data = bytearray(*_LENGTH.unpack(head))
        self._receive(0, line, memoryview(data))
        return bytes(data)

    # -- one line -----------------------------------------------------------------------------------------------------

    def _send(self, other: int, line: socket.socket, data: memoryview) -> None:
        try:
            line.sendall(data)
        except OSError as error:
            raise RuntimeError(f"rank {other} takes nothing from rank {self._rank}: {error}") from error

    def _receive(self, other: int, line: socket.socket, into: memoryview) -> None:
        try:
            while into:  # once, but for signals
                count = line.recv_into(into, len(into), socket.MSG_WAITALL)
                if not count:
                    raise RuntimeError(f"rank {other} is gone")
                into = into[count:]
        except OSError as error:
            raise RuntimeError(f"rank {self._rank} hears nothing of rank {other}: {error}") from error


def _reach(path: str) -> socket.socket:
    """Another rank's door, which may open a little later."""
    until = time.monotonic() + _HANG_S
    while True:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(path)
            return line
        except OSError:
            line.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.002)


def _wait(line: socket.socket) -> None:
    """Until there is something to read, or nobody at the other end."""
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    waiting.poll()
