"""Values returned to callers, and their encoding over RPyC: structs as msgpack bytes, failures as (code, message)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from vlora.errors import BadRequest, VLoraError, error_from_code
from vlora.types import AdapterStatus, EngineStats, ErrorValue, HeadAnswer, SamplingParams, Timings, check_priority
from vlora.wording import msgspec_errors

PROTOCOL_VERSION = 6
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 18861

T = TypeVar("T")


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of an answer's text and its log probability. top: the most likely (token, log probability), best
    first.

    Natural logarithms of the model's own distribution, before temperature and filters.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete text answer.

    finish_reason "stop": the model ended it or a stop string was met (which is not part of text); "length": max_tokens.
    logprobs: the tokens of the text, if the request asked for them. timings are the engine's; total_s is the server's
    time from the arrival of the request to the end of the answer.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    adapter: str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    timings: Timings
    total_s: float
    logprobs: tuple[TokenLogprob, ...] = ()


class HeadResult(HeadAnswer, frozen=True, kw_only=True):
    """A task head's answer, with boxes in pixels of the images as sent, the name of the head, and the time taken."""

    adapter: str
    head: str
    timings: Timings
    total_s: float


class HeadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one of several heads that were asked together: its answer, or the error of this head alone."""

    answer: HeadResult | None = None
    error: ErrorValue | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The server's description of itself. max_message_bytes: a longer message would break the connection."""

    protocol: int
    model: str
    max_message_bytes: int


class StreamPart(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of a text stream: the text since the previous one, or the complete answer, which ends it."""

    text: str = ""
    answer: Answer | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream of frames.

    max_latency_s bounds each frame, from its arrival; fps is the maximum number started per second; priority is that of
    its requests. drop: policy for frames that arrive faster than they are answered. "newest": a newer frame replaces a
    waiting one; "none": sending waits.

    Raises BadRequest for invalid values.
    """

    adapter: str
    head: str
    max_latency_s: float | None = None
    fps: float | None = None
    drop: Literal["newest", "none"] = "newest"
    priority: int = 0

    def __post_init__(self) -> None:
        for field in ("max_latency_s", "fps"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise BadRequest(f"{field} is {value}; it must be above 0")
        if self.drop not in ("newest", "none"):
            raise BadRequest(f"drop is {self.drop[:20]!r}; choose newest or none")
        check_priority(self.priority)


class FrameResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one frame, by its number in the stream: its answer, the reason it was dropped, or its error.

    latency_s: from the frame's arrival at the server to this result.
    """

    number: int
    latency_s: float
    answer: HeadResult | None = None
    dropped: str | None = None
    error: ErrorValue | None = None


class FrameResults(msgspec.Struct, frozen=True, kw_only=True):
    """One pull from a stream of frames. finished: no results follow."""

    results: tuple[FrameResult, ...] = ()
    finished: bool = False


Reply = tuple[bool, bytes] | tuple[bool, str, str]
"""(True, msgpack of the value) or (False, error code, message)."""

_encode = msgspec.msgpack.Encoder().encode
_DECODERS: dict[Any, Callable[[bytes], Any]] = {
    kind: msgspec.msgpack.Decoder(kind).decode
    for kind in (
        Answer,
        HeadResult,
        tuple[HeadOutcome, ...],
        Hello,
        StreamPart,
        FrameResults,
        str,
        bool,
        AdapterStatus,
        tuple[AdapterStatus, ...],
        EngineStats,
        type(None),
    )
}


def success(value: Any) -> Reply:
    return True, _encode(value)


def failure(error: VLoraError) -> Reply:
    return False, error.code, str(error)


def open_reply(reply: Reply, kind: type[T]) -> T:
    """The value of a reply. Raises its typed error."""
    if reply[0]:
        return _DECODERS[kind](reply[1])  # type: ignore[arg-type]
    raise error_from_code(*reply[1:])  # type: ignore[arg-type]


def sampling_pairs(sampling: SamplingParams) -> tuple[tuple[str, Any], ...]:
    """Sampling parameters as plain values, because RPyC's serializer has no dictionaries."""
    return tuple(msgspec.structs.asdict(sampling).items())


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Validate sampling options by name. Raises BadRequest with the option's name."""
    unknown = sorted(options.keys() - set(SamplingParams.__struct_fields__))
    if unknown:
        known = ", ".join(SamplingParams.__struct_fields__)
        raise BadRequest(f"unknown sampling option {unknown[0][:40]!r}; known: {known}")
    try:
        return msgspec.convert(options, SamplingParams)
    except msgspec_errors.REFUSED as error:
        raise BadRequest(msgspec_errors.described(error, value=options)) from error
