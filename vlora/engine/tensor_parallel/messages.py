"""Messages between rank 0 and the other ranks: frozen structs as msgpack. No pickle.

Orders go to all ranks in one broadcast per step; reports return over one pipe per rank.
"""

from __future__ import annotations

import msgspec

from vlora.config import EngineConfig
from vlora.parallel.adapter_sharding import ShardingKind
from vlora.types import Batch, ErrorValue, Request

# -- orders -----------------------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Add a request's tensors, including its images."""

    request: Request
    vision_key: str | None


class ReleaseRequest(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class AdapterFolder(msgspec.Struct, frozen=True):
    """The content of an adapter. version: hash of the content that rank 0 has read. weight: its factor of the delta."""

    key: str
    path: str
    version: str
    sharding: ShardingKind
    weight: float = 1.0


class LoadShard(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter, report when it is read, and keep this rank's shard in these pages.

    folders: of the adapter, or of all parts of a composition.
    """

    key: str
    folders: tuple[AdapterFolder, ...]
    first_page: int
    num_pages: int


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    first_page: int
    target: int
    num_pages: int


class MoveAdapter(msgspec.Struct, frozen=True, tag=True):
    """An adapter has moved to these pages; its pages were already copied."""

    key: str
    first_page: int
    num_pages: int


class EvictAdapter(msgspec.Struct, frozen=True, tag=True):
    key: str


class PackAdapters(msgspec.Struct, frozen=True, tag=True):
    keys: tuple[str, ...]
    first_page: int
    num_pages: int


class UnpackAdapters(msgspec.Struct, frozen=True, tag=True):
    """The pages of the packed copies are free."""


class ForgetAdapter(msgspec.Struct, frozen=True, tag=True):
    """No more requests for an adapter will arrive."""

    key: str


class SampledTokens(msgspec.Struct, frozen=True, tag=True):
    """The tokens sampled by the last step, by request."""

    tokens: dict[str, int]


class RunBatch(msgspec.Struct, frozen=True, tag=True):
    batch: Batch


Order = (
    AddRequest
    | ReleaseRequest
    | SampledTokens
    | LoadShard
    | CopyPages
    | MoveAdapter
    | EvictAdapter
    | PackAdapters
    | UnpackAdapters
    | ForgetAdapter
    | RunBatch
)

# -- reports ----------------------------------------------------------------------------------------------------------


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """The only message of rank 0 over the pipe: load the model. store_file: where NCCL's ranks meet."""

    config: EngineConfig
    rank: int
    store_file: str


class ModelLoaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. facts: values that must be equal on all ranks, by name."""

    facts: dict[str, str]


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    key: str
    error: ErrorValue | None = None


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank is about to end, with the cause. follows: the cause is the end of another rank."""

    error: ErrorValue
    follows: bool = False


Report = ModelLoaded | AdapterRead | RankFailed

encode = msgspec.msgpack.Encoder().encode
decode_orders = msgspec.msgpack.Decoder(tuple[Order, ...]).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_start = msgspec.msgpack.Decoder(StartRank).decode
