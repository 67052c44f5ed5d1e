"""Messages between an engine process and its client: frozen structs as msgpack. No pickle, no live references."""

from __future__ import annotations

import msgspec

from vlora.config import EngineConfig, Token
from vlora.engine.snapshot import EngineLoad, EngineSnapshot
from vlora.types import AdapterStatus, EngineStats, ErrorValue, Request, RequestOutput, TrainingStatus


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: build the engine. Answered by Ready, or by Failed and the end of the process."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add a request. It is answered by Outputs; a refusal is a finished output with the error."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class RegisterAdapters(msgspec.Struct, frozen=True, tag=True):
    """paths: by name. versions: the content hashes that they must have, by name."""

    call_id: int
    paths: dict[str, str]
    versions: dict[str, str] = {}


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """version: the content hash that the folder must have; empty: any."""

    call_id: int
    name: str
    path: str
    version: str = ""


class KeepAdapters(msgspec.Struct, frozen=True, tag=True):
    """From now on, keep these versions by name when other content replaces them, and no others.

    The reply has those of them that the engine has.
    """

    call_id: int
    versions: dict[str, tuple[str, ...]]


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    name: str
    drain: bool


class PinAdapter(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    name: str
    pinned: bool


class ListAdapters(msgspec.Struct, frozen=True, tag=True):
    """Answered by the first `ADAPTERS_PER_REPLY` adapters with names after `after`; a full list would delay a step."""

    call_id: int
    after: str


ADAPTERS_PER_REPLY = 250


class Train(msgspec.Struct, frozen=True, tag=True):
    """Begin the trainings of a plan file. reopen: also those that were cancelled or have failed."""

    call_id: int
    plan: str
    reopen: bool


class ListTrainings(msgspec.Struct, frozen=True, tag=True):
    call_id: int


class ReplaceBaseTokens(msgspec.Struct, frozen=True, tag=True):
    """Admit clients of the base model with these tokens from now on. It is not answered."""

    tokens: tuple[Token, ...]


class CancelTraining(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    name: str


class GetStats(msgspec.Struct, frozen=True, tag=True):
    call_id: int


class GetSnapshot(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    since: int


class WatchLoad(msgspec.Struct, frozen=True, tag=True):
    """Send a LoadReport now, and after changes at most one in `every_s` seconds."""

    every_s: float


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by Pong at once, even during a step."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Cancel all running requests and end the process."""


Call = (
    RegisterAdapters
    | LoadAdapter
    | KeepAdapters
    | UnloadAdapter
    | PinAdapter
    | ListAdapters
    | Train
    | ListTrainings
    | CancelTraining
    | GetStats
    | GetSnapshot
)
"""Calls that are answered by a Reply of the same call_id."""

ToEngine = Start | Add | Cancel | Call | ReplaceBaseTokens | WatchLoad | Ping | Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is built.

    Attributes:
        max_context: Maximum tokens of one request, prompt and answer together.
        block_size: Tokens per KV block.
    """

    model: str
    pid: int
    max_context: int
    max_batch_size: int = 1
    block_size: int = 1
    num_blocks: int = 1


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process is about to end, with the cause: a model that cannot be loaded keeps its typed error."""

    error: ErrorValue


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: tuple[RequestOutput, ...]


class Reply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to the call with that id; the fields are those that the call returns, or error if it was refused."""

    call_id: int
    error: ErrorValue | None = None
    adapters: tuple[AdapterStatus, ...] = ()
    contents: dict[str, tuple[str, ...]] = {}
    trainings: tuple[TrainingStatus, ...] = ()
    stats: EngineStats | None = None
    snapshot: EngineSnapshot | None = None


class LoadReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine's load, with adapters as changes since the previous report.

    Attributes:
        load: Its `resident` has only the adapters that were loaded or got other content.
        num_taken: Requests added since WatchLoad, refused ones included: the load includes these.
        evicted: Names of the adapters that are no longer on the device.
        is_complete: `load.resident` has all adapters: this is the first report after WatchLoad.
    """

    load: EngineLoad
    num_taken: int
    evicted: tuple[str, ...] = ()
    is_complete: bool = False


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The process is alive. step_s: for how long the current step has been running; 0 if the engine is idle."""

    step_s: float


FromEngine = Ready | Failed | Outputs | Reply | LoadReport | Pong

encode = msgspec.msgpack.Encoder().encode
PING = encode(Ping())
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
