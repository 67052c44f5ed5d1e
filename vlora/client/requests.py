"""The calls of a connection: requests for answers, streams of frames, and what concerns the connection itself."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vlora.client.values import Answer, FrameResults, HeadOutcome, HeadResult, Hello, StreamOptions
from vlora.operations import Operation, OperatorCall, WaitS
from vlora.types.domain import Way
from vlora.types.request import MAX_INPUTS, MAX_ITEMS, MAX_VISUALS, Pooling, SamplingParams
from vlora.types.video import Video, VideoFile

Images = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_VISUALS)]
"""Encoded images. A message has bounds on its values; the limits of a server are below them."""


SentVisual = bytes | Video[bytes] | VideoFile[bytes]
Visuals = Annotated[tuple[SentVisual, ...], msgspec.Meta(max_length=MAX_VISUALS)]

Documents = Annotated[tuple[str | Visuals, ...], msgspec.Meta(max_length=MAX_INPUTS)]
"""Texts, and pictures and videos that are read together."""


class Authenticate(Operation, frozen=True):
    """The first call of a connection. A valid token authenticates it for the others."""

    result = Hello
    token: str | None = None


class Cancel(Operation, frozen=True):
    """End a request of this connection. Unknown numbers are ignored."""

    call_id: int


class CancellableCall(Operation, frozen=True, kw_only=True):
    """call_id: for `Cancel`, unique among the calls of a connection; 0 if it is not to be cancelled.

    traceparent: W3C's, of the caller's span; empty without one.
    """

    call_id: int = 0
    traceparent: str = ""


class LevelledCall(CancellableCall, frozen=True, kw_only=True):
    """With a service level, as in `vlora.types.Request`."""

    max_latency_s: float | None = None
    priority: int = 0


class Generate(LevelledCall, frozen=True, kw_only=True):
    """Its answer is a value, or a stream of `StreamPart`s, of which the last has the answer."""

    result = Answer
    question: str
    images: Visuals = ()
    adapter: str | None = None
    sampling: SamplingParams = SamplingParams()
    max_ttft_s: float | None = None
    answer: Way | None = None


class AskHead(LevelledCall, frozen=True, kw_only=True):
    """head: None for the domain's, or the adapter's only one."""

    result = HeadResult
    images: Images
    adapter: str
    head: str | None = None


class AskHeads(LevelledCall, frozen=True, kw_only=True):
    """heads: pairs of an adapter and a head."""

    result = tuple[HeadOutcome, ...]
    images: Images
    heads: Annotated[tuple[tuple[str, str | None], ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Embed(CancellableCall, frozen=True, kw_only=True):
    """Returns an embedding for each: of texts without the chat template, or pictures and videos as a user's turn."""

    result = tuple[tuple[float, ...], ...]
    documents: Documents
    adapter: str | None = None
    pooling: Pooling = "last"


class GetScores(CancellableCall, frozen=True, kw_only=True):
    """Returns the probability of "yes" as the answer to a question about each."""

    result = tuple[float, ...]
    question: str
    documents: Documents
    adapter: str | None = None


class Tokenize(CancellableCall, frozen=True, kw_only=True):
    """The token ids of a text, or with `chat` or images those of a question as `Generate` sends it to the model."""

    result = tuple[int, ...]
    text: str
    images: Visuals = ()
    chat: bool = False


class Detokenize(Operation, frozen=True):
    """The text of token ids, with special tokens by name."""

    result = str
    tokens: tuple[int, ...]


class OpenFrames(Operation, frozen=True):
    """Returns the id of a stream of frames."""

    result = str
    options: StreamOptions


class SendFrame(Operation, frozen=True):
    """Returns whether the frame was accepted; waits for room. images: encoded, or (RGB bytes, height, width)."""

    result = bool
    stream_id: str
    number: int
    images: Annotated[tuple[bytes | tuple[bytes, int, int], ...], msgspec.Meta(max_length=MAX_VISUALS)]
    wait_s: WaitS


class PullResults(Operation, frozen=True):
    """acknowledged: number of the last frame with a received result; -1 for none."""

    result = FrameResults
    stream_id: str
    acknowledged: int
    wait_s: WaitS


class EndFrames(Operation, frozen=True):
    """End the stream's input; remaining results can still be pulled."""

    stream_id: str


class CloseFrames(Operation, frozen=True):
    """Cancel active frames and discard unread results. Unknown streams are ignored."""

    stream_id: str


FramesCall = OpenFrames | SendFrame | PullResults | EndFrames | CloseFrames
InputCall = Embed | GetScores | Tokenize | Detokenize
ClientCall = Authenticate | Cancel | Generate | AskHead | AskHeads | InputCall | FramesCall | OperatorCall
