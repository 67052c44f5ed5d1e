"""What travels between rank 0 and the other ranks: frozen messages as msgpack. No pickle.

Orders go to all ranks in one broadcast per step; words go back over a pipe of each rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlora.config import EngineConfig
from vlora.parallel.adapter_sharding import Way
from vlora.types import Batch, ErrorValue, Request

# -- orders -----------------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take a request's tensors in, its images with it."""

    request: Request
    vision_key: str | None


class Release(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Bring(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter, say that it is read, and keep this rank's part of it in these pages from then on.

    version: hash of the content that rank 0 has read.
    """

    key: str
    path: str
    version: str
    way: Way
    first_page: int
    num_pages: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy pages of the arena, whatever lies in them."""

    first_page: int
    target: int
    num_pages: int


class Move(msgspec.Struct, frozen=True, tag=True):
    """An adapter lies here now; its pages were copied."""

    key: str
    first_page: int
    num_pages: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """The pages of an adapter are another's."""

    key: str


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Keep packed copies of these adapters in these pages."""

    keys: tuple[str, ...]
    first_page: int
    num_pages: int


class Unpack(msgspec.Struct, frozen=True, tag=True):
    """The pages of the packed copies are another's."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Nobody will ask for an adapter again."""

    key: str


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """What the last step brought, by request."""

    tokens: dict[str, int]


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run a step."""

    batch: Batch


Order = Add | Release | Sampled | Bring | Copy | Move | Drop | Pack | Unpack | Forget | Run

# -- words ------------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's one word over the pipe: load the model. store_file: where NCCL's ranks meet."""

    config: EngineConfig
    rank: int
    store_file: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. facts: what must be the same on all ranks, by name."""

    facts: dict[str, str]


class Brought(msgspec.Struct, frozen=True, tag=True):
    """An adapter was read, or why not."""

    key: str
    error: ErrorValue | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank is about to end, and why. follows: because another one is gone, whose own end is the cause."""

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
