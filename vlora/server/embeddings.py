"""Embeddings and scores of several documents, and token ids, which RPyC and HTTP have in common."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from vlora.client.requests import Detokenize, GetScores, InputCall, Tokenize
from vlora.client.values import Answer
from vlora.errors import BadRequest
from vlora.server.execution import interleave
from vlora.server.frontend import FrontEnd
from vlora.server.prompts import Conversation, Level, PlainText, TextRequest, Visual, as_prompt
from vlora.types import MAX_LOGPROBS, SamplingParams, Timings
from vlora.types.video import Video, VideoFile

_TOGETHER = 64  # documents of one call that are requests of the engine at a time
_FIRST_TOKEN = SamplingParams(max_tokens=1, min_tokens=1, logprobs=MAX_LOGPROBS)


async def for_each(front_end: FrontEnd, call: Callable[[Any], Awaitable[Any]], items: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a call for all items, some at a time. The first error ends the others."""
    room = asyncio.Semaphore(min(_TOGETHER, front_end.config.max_requests))

    async def result(item: Any) -> AsyncGenerator[Any, None]:
        async with room:
            yield await call(item)

    found = dict([each async for each in interleave([result(item) for item in items])])
    return tuple(found[place] for place in range(len(items)))


async def score(
    front_end: FrontEnd,
    parts: Sequence[dict[str, str]],
    visuals: Sequence[Visual],
    question: str,
    adapter: str | None,
    level: Level,
) -> tuple[float, Timings]:
    """VQAScore (https://arxiv.org/abs/2404.01291, section 3): P("yes") as the answer to a question about a document.

    parts, visuals: the document as content of a user's turn.
    """
    if parts and parts[-1]["type"] == "text":
        parts, question = parts[:-1], f"{parts[-1]['text']}\n{question}"
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    asked = TextRequest([turn], visuals, adapter, _FIRST_TOKEN, level, whole=True, answer="words")
    *_, (_, answer) = [part async for part in front_end.generate(asked)]
    assert isinstance(answer, Answer), "an answer is the last part"
    return yes_probability(answer), answer.timings


def yes_probability(answer: Answer) -> float:
    """P("yes") of the first token, over its spellings among the most likely tokens; 0 if none of them is a "yes"."""
    top = answer.logprobs[0].top if answer.logprobs else ()
    return min(1.0, math.fsum(math.exp(logprob) for token, logprob in top if token.strip().lower() == "yes"))


def detokenize(front_end: FrontEnd, tokens: Sequence[int]) -> str:
    """The text of token ids, with special tokens by name. Raises BadRequest for an id that the model does not have."""
    rows = front_end.processor.config.text_config.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < rows]:
        raise BadRequest(f"tokens has the id {wrong[0]}; this model's ids run from 0 to {rows - 1}", field="tokens")
    return front_end.processor.decode(tokens, special=True)


async def perform_input_call(front_end: FrontEnd, call: InputCall, tenant: str | None) -> Any:
    if isinstance(call, Detokenize):
        return detokenize(front_end, call.tokens)
    if isinstance(call, Tokenize):
        chat = call.chat or call.images
        prompt = as_prompt(call.text, call.images) if chat else PlainText(call.text)
        return await front_end.tokenize(prompt, call.images, tenant)
    level = Level(tenant=tenant)

    async def value(document: str | Sequence[Visual]) -> tuple[float, ...] | float:
        text, visuals = (document, ()) if isinstance(document, str) else (None, document)
        parts = [{"type": "video" if isinstance(one, Video | VideoFile) else "image"} for one in visuals]
        if isinstance(call, GetScores):
            parts = parts if text is None else [{"type": "text", "text": text}]
            return (await score(front_end, parts, visuals, call.question, call.adapter, level))[0]
        turn = Conversation([{"role": "user", "content": parts}], begins_answer=False)
        prompt = turn if text is None else PlainText(text)
        return (await front_end.embed(prompt, visuals, call.adapter, level, call.pooling))[0].values

    return await for_each(front_end, value, call.documents)
