"""Sockets between the ranks of one box, read and written by the very thread that needs what they carry.

A library of collectives hands each of them to a thread of its own, whose sockets yet another thread watches. With
tensors of a few kilobytes, as a step that decodes has them, nearly all of its time goes into waking threads one after
the other (docs/decisions.md, 2026-11-22). Here only a rank that came early is woken, once.

Every message begins with its number, its size and what it is for, so that ranks which have come apart are told so by
the first message that differs, and never take one thing for another.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
from collections.abc import Mapping

import torch

_HANG_S = 120  # a rank that dies closes its sockets, and the others fail at once; this is for one that lives and hangs
_PIECE_BYTES = 48 * 1024
_HEAD = struct.Struct("<QQ16s")  # the message's number, the bytes behind this, and what they are for
_ORDERS = "orders"

Ends = Mapping[int, socket.socket]
"""A rank's end of its line to each other rank, by that rank."""


class RanksApart(RuntimeError):
    """Ranks cannot go on together: one is gone or hangs, or says what nobody expects."""


class RankGone(RanksApart):
    """Another rank is: its end came first, and whoever raises this only follows."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")


def connect(size: int) -> list[dict[int, socket.socket]]:
    """Lines between `size` ranks: what each is to be given, by rank.

    Made before there are ranks, so that they need not find each other: a line to a rank that is still loading is open,
    and one to a rank that died is closed, whenever that was. Whoever makes ranks must close what it has given away.
    """
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        ends[one][other], ends[other][one] = socket.socketpair()
    return ends


class Lines:
    """One socket between any two ranks. All ranks make the same calls in the same order.

    Raises RanksApart when they did not, when another rank is gone, or has said nothing for two minutes.
    """

    def __init__(self, rank: int, ends: Ends) -> None:
        """Wait until all ranks are here: as long as they live, however long they load."""
        self._rank = rank
        self._size = len(ends) + 1
        self._others = dict(ends)
        self._number = 0
        # The system's own limits on a call: a socket's timeout in Python would make two of each.
        limit = struct.pack("ll", _HANG_S, 0)
        for line in self._others.values():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._piece = min(_piece_of(line) for line in self._others.values())
        self._head = bytearray(_HEAD.size)  # of the message that is read
        self._piece = int(self.exchange(torch.tensor(self._piece), "piece", patient=True).min())

    def close(self) -> None:
        for line in self._others.values():
            line.close()

    # -- tensors ------------------------------------------------------------------------------------------------------

    def exchange(self, tensor: torch.Tensor, what_for: str, *, patient: bool = False) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's contiguous tensor on a CPU, in the order of ranks.

        what_for: up to 16 letters, which must be the same on all ranks. patient: others may take as long as they like
        to get here.

        Everybody sends before reading, a piece at a time. What a rank has sent and another has not read are two pieces
        at most: to send a third, it must have read the second of the other's, who sends that after reading the first.
        So no buffer fills up (`_piece_of`), and nobody waits to be read by one who waits likewise.
        """
        out = tensor.new_empty(self._size, *tensor.shape)
        out[self._rank] = tensor
        rows = [memoryview(row) for row in out.view(self._size, tensor.numel()).view(torch.uint8).numpy()]
        own = rows[self._rank]
        head = self._next_head(len(own), what_for)
        for other, line in self._others.items():
            self._send_first(other, line, head, own[: self._piece])
        for other, line in self._others.items():
            if patient:
                _wait(line)
            self._receive_first(other, line, head, rows[other][: self._piece])
        for start in range(self._piece, len(own), self._piece):
            piece = slice(start, start + self._piece)
            for other, line in self._others.items():
                self._send(other, line, own[piece])
            for other, line in self._others.items():
                self._receive(other, line, rows[other][piece])
        return out

    # -- rank 0's words -----------------------------------------------------------------------------------------------

    def tell(self, data: bytes) -> None:
        """Rank 0: to every other rank, for its `hear`."""
        message = self._next_head(len(data), _ORDERS) + data
        for other, line in self._others.items():
            self._send(other, line, message)

    def hear(self) -> bytes:
        """Any other rank: what rank 0 tells next, however long it takes to."""
        line = self._others[0]
        _wait(line)
        self._receive(0, line, memoryview(self._head))
        _, size, _ = _HEAD.unpack(self._head)
        self._check(0, self._next_head(size, _ORDERS))
        data = bytearray(size)
        self._receive(0, line, memoryview(data))
        return bytes(data)

    # -- heads --------------------------------------------------------------------------------------------------------

    def _next_head(self, num_bytes: int, what_for: str) -> bytes:
        self._number += 1
        return _HEAD.pack(self._number, num_bytes, what_for.encode())

    def _check(self, other: int, wanted: bytes) -> None:
        """Raises RanksApart unless the head that came from `other` is the one that this rank would have sent."""
        if self._head != wanted:
            raise RanksApart(
                f"ranks have come apart: rank {other} sent {_in_words(self._head)}, where rank {self._rank} expects "
                f"{_in_words(wanted)}"
            )

    # -- one line -----------------------------------------------------------------------------------------------------

    def _send(self, other: int, line: socket.socket, data: bytes | memoryview) -> None:
        try:
            line.sendall(data)
        except ConnectionError as error:
            raise RankGone(other) from error
        except OSError as error:
            raise RanksApart(f"rank {other} takes nothing from rank {self._rank}: {error}") from error

    def _send_first(self, other: int, line: socket.socket, head: bytes, data: memoryview) -> None:
        try:
            sent = line.sendmsg((head, data))
        except OSError:
            sent = 0  # what is wrong is told by the next try
        if sent < len(head) + len(data):
            self._send(other, line, (head + data)[sent:])

    def _receive_first(self, other: int, line: socket.socket, head: bytes, into: memoryview) -> None:
        """A head, which must be `head`, and what is behind it: nearly always in one call."""
        try:
            # Not until all is there: of a message that is shorter than expected, the rest would never come.
            count = line.recvmsg_into((self._head, into))[0]
        except OSError as error:
            raise self._unheard(other, error) from error
        if count == len(head) + len(into) and self._head == head:
            return
        if not count:
            raise RankGone(other)
        self._receive(other, line, memoryview(self._head)[count:])
        self._check(other, head)
        self._receive(other, line, into[max(0, count - len(head)) :])

    def _receive(self, other: int, line: socket.socket, into: memoryview) -> None:
        try:
            while into:  # once, but for signals
                count = line.recv_into(into, len(into), socket.MSG_WAITALL)
                if not count:
                    raise RankGone(other)
                into = into[count:]
        except OSError as error:
            raise self._unheard(other, error) from error

    def _unheard(self, other: int, error: OSError) -> RanksApart:
        if isinstance(error, ConnectionError):
            return RankGone(other)
        return RanksApart(f"rank {self._rank} hears nothing of rank {other}: {error}")


def _in_words(head: bytes | bytearray) -> str:
    number, num_bytes, what_for = _HEAD.unpack_from(head)
    return f"message {number} ({what_for.rstrip(bytes(1)).decode(errors='replace')}, {num_bytes} bytes)"


def _piece_of(line: socket.socket) -> int:
    """The bytes of a piece, two of which fit into the line's buffer with what the system keeps around them.

    Half of the buffer is for that: Linux itself doubles what it is asked for. It gives less where its own limit
    (net.core.wmem_max) is lower, so what it gave counts.
    """
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _PIECE_BYTES)
    return min(_PIECE_BYTES, line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4)


def _wait(line: socket.socket) -> None:
    """Until there is something to read, or nobody at the other end."""
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    waiting.poll()
