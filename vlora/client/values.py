"""Values returned to callers, and their encoding over RPyC: structs as msgpack bytes, failures as (code, message)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from vlora.errors import BadRequest, VLoraError, error_from_code
from vlora.types import (
    MAX_ITEMS,
    ErrorValue,
    HeadAnswer,
    SamplingParams,
    Timings,
    check_priority,
)
from vlora.types.domain import Way
from vlora.wording import msgspec_errors

PROTOCOL_VERSION = 11
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 18861

K = TypeVar("K")


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of an answer's text and its log probability. top: the most likely (token, log probability), best
    first.

    Natural logarithms of the model's own distribution, before temperature and filters.

    data, top_data: the bytes that the tokens add to the answer; a token may be a part of a character. None for special
    tokens, which are shown by name.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    data: bytes | None = None
    top_data: tuple[bytes | None, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete text answer.

    finish_reason "stop": the model ended it or a stop string was met (which is not part of text); "length": max_tokens.
    logprobs: the tokens of the text, if the request asked for them. timings are the engine's; total_s is the server's
    time from the arrival of the request to the end of the answer. request_id: for `Client.correct`.

    answered_by: a head, whose label is the text and whose complete answer is `result`, or words. domain: that was asked
    about, if it is known. confidence: of a head, the estimated probability that the answer is right; of words, the
    model's probability of the text (None if neither the domain is known nor log probabilities were asked for).
    """

    text: str
    finish_reason: Literal["stop", "length"]
    adapter: str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    timings: Timings
    total_s: float
    logprobs: tuple[TokenLogprob, ...] = ()
    request_id: str = ""
    answered_by: Way = "words"
    domain: str | None = None
    confidence: float | None = None
    result: HeadResult | None = None


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


class TextQuestion(NamedTuple):
    """A question about each frame of a stream, which `adapter` (None: the base model) answers in words."""

    question: str
    adapter: str | None = None
    max_tokens: int = 64


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream of frames.

    heads: pairs of an adapter and one of its heads, which answer each frame, as do the `questions`. max_latency_s
    bounds each frame, from its arrival; fps is the maximum number started per second; priority is that of
    its requests. drop: policy for frames that arrive faster than they are answered. "newest": a newer frame replaces a
    waiting one; "none": sending waits. name: shown beside the stream, such as its camera's.

    Raises BadRequest for invalid values.
    """

    heads: Annotated[tuple[tuple[str, str], ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    questions: Annotated[tuple[TextQuestion, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    max_latency_s: float | None = None
    fps: float | None = None
    drop: Literal["newest", "none"] = "newest"
    priority: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not self.heads and not self.questions:
            raise BadRequest("the stream has no head and no question; give at least one", field="heads")
        for adapter, head in _repeated(self.heads):
            raise BadRequest(f"head {head[:40]!r} of adapter {adapter[:40]!r} is given twice", field="heads")
        for asked, question in _repeated((each.adapter, each.question) for each in self.questions):
            owner = "the base model" if asked is None else f"adapter {asked[:40]!r}"
            raise BadRequest(f"question {question[:40]!r} to {owner} is given twice", field="questions")
        for each in self.questions:
            if not each.question.strip():
                raise BadRequest("a question of the stream is empty; send a text", field="questions")
            sampling_params({"max_tokens": each.max_tokens})
        for field in ("max_latency_s", "fps"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise BadRequest(f"{field} is {value}; it must be above 0")
        if self.drop not in ("newest", "none"):
            raise BadRequest(f"drop is {self.drop[:20]!r}; choose newest or none")
        if len(self.name) > 100:
            raise BadRequest(f"name has {len(self.name)} characters; the maximum is 100", field="name")
        check_priority(self.priority)


class FrameAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one head or one text question of a stream about a frame: `answer` or `text`, or its error.

    adapter, head, question: as the stream was opened with; `head` is None for a question, `question` for a head.
    """

    adapter: str | None
    head: str | None = None
    question: str | None = None
    answer: HeadResult | None = None
    text: Answer | None = None
    error: ErrorValue | None = None

    @property
    def label(self) -> str | None:
        """The label of the head's answer, or the text of the question's; None for an error."""
        if self.text is not None:
            return self.text.text
        return None if self.answer is None else self.answer.label


class FrameResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one frame, by its number in the stream: its answers, the reason it was dropped, or its error.

    answers: of the stream's heads and then of its questions, in the order they were given; empty for a frame that was
    not started. error: set if nothing was answered; that of the first answer, where there are answers. latency_s: from
    the frame's arrival at the server to this result.
    """

    number: int
    latency_s: float
    answers: tuple[FrameAnswer, ...] = ()
    dropped: str | None = None
    error: ErrorValue | None = None

    @property
    def answer(self) -> HeadResult | None:
        """The answer of the stream's first head; None if it has no head, and if that head did not answer."""
        return self.answers[0].answer if self.answers else None


class FrameResults(msgspec.Struct, frozen=True, kw_only=True):
    """One pull from a stream of frames. finished: no results follow."""

    results: tuple[FrameResult, ...] = ()
    finished: bool = False


Reply = tuple[bool, bytes] | tuple[bool, str, str]
"""(True, msgpack of the value) or (False, error code, message)."""

_encode = msgspec.msgpack.Encoder().encode


@functools.cache
def _decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


def success(value: Any) -> Reply:
    return True, _encode(value)


def failure(error: VLoraError) -> Reply:
    return False, error.code, str(error)


def open_reply(reply: Reply, kind: Any) -> Any:
    """The value of a reply, of the type `kind`. Raises its typed error."""
    if reply[0]:
        return _decoder(kind)(reply[1])  # type: ignore[arg-type]
    raise error_from_code(*reply[1:])  # type: ignore[arg-type]


def _repeated(values: Iterable[K]) -> list[K]:
    return [value for value, count in Counter(values).items() if count > 1]


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
