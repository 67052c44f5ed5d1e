"""Messages between rank 0 and the other ranks: frozen structs as msgpack. No pickle.

Orders go to all ranks in one broadcast per step; replies return over one pipe per rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlora.config import EngineConfig
from vlora.parallel.adapter_sharding import Way
from vlora.types import Batch, ErrorValue, Request

# -- orders -----------------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add a request's tensors, including its images."""

    request: Request
    vision_key: str | None


class Release(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Bring(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter, report when it is read, and keep this rank's shard in these pages.

    version: hash of the content that rank 0 has read.
    """

    key: str
    path: str
    version: str
    way: Way
    first_page: int
    num_pages: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy pages of the arena, regardless of their content."""

    first_page: int
    target: int
    num_pages: int


class Move(msgspec.Struct, frozen=True, tag=True):
    """An adapter has moved to these pages; its pages were already copied."""

    key: str
    first_page: int
    num_pages: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """The pages of an adapter are free."""

    key: str


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Keep packed copies of these adapters in these pages."""

    keys: tuple[str, ...]
    first_page: int
    num_pages: int


class Unpack(msgspec.Struct, frozen=True, tag=True):
    """The pages of the packed copies are free."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """No more requests for an adapter will arrive."""

    key: str


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """The tokens sampled by the last step, by request."""

    tokens: dict[str, int]


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run a step."""

    batch: Batch


Order = Add | Release | Sampled | Bring | Copy | Move | Drop | Pack | Unpack | Forget | Run

# -- replies ----------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag=True):
    """The only message of rank 0 over the pipe: load the model. store_file: where NCCL's ranks meet."""

    config: EngineConfig
    rank: int
    store_file: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. facts: values that must be equal on all ranks, by name."""

    facts: dict[str, str]


class Brought(msgspec.Struct, frozen=True, tag=True):
    """An adapter was read, or the error."""

    key: str
    error: ErrorValue | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank is about to end, with the cause. follows: the cause is the end of another rank."""

    error: ErrorValue
    follows: bool = False


Word = Loaded | Brought | Failed

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(tuple[Order, ...])
_words = msgspec.msgpack.Decoder(Word)
_start = msgspec.msgpack.Decoder(Start)


def encode(message: Sequence[Order] | Word | Start) -> bytes:
    return _encoder.encode(message)


def decode_orders(data: bytes) -> tuple[Order, ...]:
    return _orders.decode(data)


def decode_word(data: bytes) -> Word:
    return _words.decode(data)


def decode_start(data: bytes) -> Start:
    return _start.decode(data)
