"""Messages between an engine process and its client: frozen structs as msgpack. No pickle, no live references."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from vlora.config import EngineConfig, Token
from vlora.engine.operations import EngineOperation
from vlora.engine.snapshot import EngineLoad
from vlora.types import ErrorValue, Request, RequestOutput

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: build the engine. Answered by Ready, or by Failed and the end of the process."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add a request. It is answered by Outputs; a refusal is a finished output with the error."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Call(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """Perform an `Operation`. It is answered by a Reply with the same call_id."""

    call_id: int
    operation: T


class ReplaceBaseTokens(msgspec.Struct, frozen=True, tag=True):
    """Admit clients of the base model with these tokens from now on. It is not answered."""

    tokens: tuple[Token, ...]


class WatchLoad(msgspec.Struct, frozen=True, tag=True):
    """Send a LoadReport now, and after changes at most one in `every_s` seconds."""

    every_s: float


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by Pong at once, even during a step."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Cancel all running requests and end the process."""


ToEngine = Start | Add | Cancel | Call[msgspec.Raw] | ReplaceBaseTokens | WatchLoad | Ping | Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is built.

    Attributes:
        max_context: Maximum tokens of one request, prompt and answer together.
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


class Reply(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """The answer to the call with that id: the operation's result, or the error if it was refused."""

    call_id: int
    value: T = None  # type: ignore[assignment]  # with an error
    error: ErrorValue | None = None


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


FromEngine = Ready | Failed | Outputs | Reply[msgspec.Raw] | LoadReport | Pong

encode = msgspec.msgpack.Encoder().encode
PING = encode(Ping())
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_operation = msgspec.msgpack.Decoder(EngineOperation).decode
