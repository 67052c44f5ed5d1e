"""Messages between rank 0 and the other ranks, as msgpack. No pickle.

Orders, which are names and arguments of methods of the worker, go to all ranks in one broadcast per step; reports
return over one pipe per rank.
"""

from __future__ import annotations

import msgspec

from vlora.config import EngineConfig
from vlora.parallel.adapter_sharding import ShardingKind
from vlora.types import ErrorValue


class AdapterFolder(msgspec.Struct, frozen=True):
    """The content of an adapter. version: hash of the content that rank 0 has read. weight: its factor of the delta."""

    key: str
    path: str
    version: str
    sharding: ShardingKind
    weight: float = 1.0


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
decode_orders = msgspec.msgpack.Decoder(tuple[tuple[str, msgspec.Raw], ...]).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_start = msgspec.msgpack.Decoder(StartRank).decode
