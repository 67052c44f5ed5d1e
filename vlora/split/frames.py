"""Calls of a client to a base executor, and what both send of themselves in the handshake (`vlora.wire.handshake`).

After the handshake the client sends one call at a time, and each is answered by one reply: a head of fixed size, and
raw tensors. A tensor follows its head on the connection, or is in memory that both processes map; heads never are, so a
client cannot change what was checked. There is no pickle.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec

from vlora.wire.handshake import Protocol

PROTOCOL = Protocol("base executor", "base executor, protocol 3", "token")
DTYPES = ("float32", "bfloat16", "float16")
"""A dtype's number in a head is its index here."""

_CALL = struct.Struct("<IBBHHxxIIQ")
_REPLY = struct.Struct("<IBxxxQ")
CALL_BYTES, REPLY_BYTES = _CALL.size, _REPLY.size


class Direction(enum.IntEnum):
    """FORWARD: x W^T + b. BACKWARD: dy W, summed over the layers. WITHOUT_BIAS: x W^T, the effect of noise."""

    FORWARD = 1
    BACKWARD = 2
    WITHOUT_BIAS = 3


class Status(enum.IntEnum):
    OK = 0
    REFUSED = 1  # the reply's body is the reason; the connection is closed after it


class CallHead(NamedTuple):
    """A call. `mask` selects layers of the group by bits; `num_bytes` is 0 for a tensor in shared memory."""

    number: int
    direction: int
    dtype: int
    group: int
    mask: int
    rows: int
    width: int
    num_bytes: int

    def pack(self) -> bytes:
        return _CALL.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> CallHead:
        return cls(*_CALL.unpack(data))


class ReplyHead(NamedTuple):
    """The answer to the call of that number. `num_bytes` is 0 for a tensor in shared memory."""

    number: int
    status: int
    num_bytes: int

    def pack(self) -> bytes:
        return _REPLY.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> ReplyHead:
        return cls(*_REPLY.unpack(data))


class LayerInfo(msgspec.Struct, frozen=True):
    """A layer, or this shard's rows `first` to `last` of its weight [d_out, d_in].

    Attributes:
        digest: Of these rows' values; empty for a layer that several shards hold together.
    """

    name: str
    d_in: int
    d_out: int
    first: int
    last: int
    digest: bytes

    @property
    def width(self) -> int:
        """Number of outputs that this executor computes."""
        return self.last - self.first


Group = tuple[LayerInfo, ...]
"""Layers that read the same input: one call computes all of them."""


def selected(group: Group, mask: int) -> list[LayerInfo]:
    return [layer for index, layer in enumerate(group) if mask >> index & 1]


def widths(group: Group, direction: int, mask: int) -> tuple[list[int], list[int]]:
    """Widths of a call's inputs and of its outputs."""
    outer, inner = [layer.width for layer in selected(group, mask)], [group[0].d_in]
    return (outer, inner) if direction == Direction.BACKWARD else (inner, outer)


class ClientInfo(msgspec.Struct, frozen=True):
    """What a client says of itself in the handshake.

    Attributes:
        fingerprint: Of the base that the client worked with before; empty at the first connection.
        client: A name for the executor's log.
        shared_memory: Whether tensors travel in shared memory; on Unix sockets only.
    """

    fingerprint: str
    client: str
    shared_memory: bool


class BaseInfo(msgspec.Struct, frozen=True):
    """What an executor says of itself in the handshake, once the client is admitted.

    Attributes:
        fingerprint: Digest of all layers; equal for equal weights.
        shard: Index and number of the executors that share each layer's outputs.
        half_bytes: Maximum bytes of a call's inputs, and of its outputs. Shared memory has two such halves.
        instance: Random bytes of the executor, equal at all of its addresses.
    """

    model: str
    fingerprint: str
    dtype: str
    shard: tuple[int, int]
    groups: tuple[Group, ...]
    max_rows: int
    half_bytes: int
    instance: bytes
