"""Embeddings, scores and token ids over HTTP, as in OpenAI's and vLLM's APIs; reranking as Jina's and Cohere's, too."""

from __future__ import annotations

import base64
import functools
import struct
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from vlora.client.inputs import PICTURE_QUESTION, TEXT_QUESTION, question_about
from vlora.errors import BadRequest
from vlora.server.embeddings import detokenize, for_each, score
from vlora.server.frontend import FrontEnd
from vlora.server.http.chat_request import MAX_MESSAGES, ChatMessage, conversation_of
from vlora.server.http.errors import unless_disconnected
from vlora.server.http.sampling_fields import ModelFields, StrictModel
from vlora.server.http.text_completions import Prompts
from vlora.server.prompts import Conversation, Level, PlainText, Visual
from vlora.server.security.access import tenant
from vlora.types import Timings
from vlora.types.request import MAX_INPUTS, Pooling


class Document(ChatMessage):
    """A document of parts: the content of a message."""

    role: Literal["user"] = "user"


_LISTED = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
_IN_PARTS = BeforeValidator(lambda value: {"content": value} if isinstance(value, str) else value, str | Document)
Documents = Annotated[
    list[Annotated[Document, _IN_PARTS]], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), _LISTED
]


class EmbeddingRequest(ModelFields):
    """Either input or messages (as in vLLM, with pictures), which the chat template turns into one input. pooling: the
    state of the last token, or the mean of all. dimensions: the model's own number only."""

    input: Prompts = Field([])
    messages: list[ChatMessage] = Field([], max_length=MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool = False
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    pooling: Pooling = "last"


class ScoreRequest(ModelFields):
    """text_1: one query for all documents, or one for each. text_2: documents, texts or parts with pictures. question:
    what the model is asked about each document, with {} in the place of the query."""

    text_1: Annotated[list[str], Field(fail_fast=True), _LISTED]
    text_2: Documents
    question: str | None = None


class RerankRequest(ModelFields):
    """top_n: the number of results, 0 for all. return_documents: of results, if they are texts. question: see score."""

    query: str
    documents: Documents
    top_n: int = Field(0, ge=0)
    return_documents: bool = True
    question: str | None = None


class TokenizeRequest(StrictModel):
    """Either prompt or messages. add_special_tokens: to a prompt; a chat template has its own."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = Field([], max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]], Field(fail_fast=True)]


class EmbeddingRoutes:
    """Requests that are answered without text: by one pass over each input, by its first token, or by the tokenizer."""

    def __init__(self, front_end: FrontEnd, model: str) -> None:
        self._front_end = front_end
        self._model = model

    def add_to(self, app: FastAPI) -> None:
        for path in ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize"):
            app.post(path)(getattr(self, path.rpartition("/")[2]))

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> Response:
        """The last hidden state of the language model for each input, pooled, with length 1."""
        if bool(body.input) == bool(body.messages):
            raise BadRequest("send either input or messages", field="input")
        size = self._front_end.processor.config.text_config.hidden_size
        if body.dimensions not in (None, size):
            why = f"this model's embeddings have {size} and are not trained to be shortened; leave it out"
            raise BadRequest(f"dimensions is {body.dimensions}; {why}", field="dimensions")
        inputs = [_conversation(body, request)] if body.messages else [(each, ()) for each in body.input]
        embed = functools.partial(self._front_end.embed, pooling=body.pooling)
        found = await self._for_each(body, request, embed, inputs)
        encode = _base64 if body.encoding_format == "base64" else list
        return _listed("embedding", "embedding", body, [(encode(answer.values), timings) for answer, timings in found])

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        """The probability that the model answers "yes" to the question about each document."""
        if len(body.text_1) not in (1, len(body.text_2)):
            counts = f"{len(body.text_1)} queries and text_2 {len(body.text_2)} documents"
            raise BadRequest(f"text_1 has {counts}; send one query, or one for each document", field="text_1")
        return _listed("score", "score", body, await self._scores(body, request, body.text_1, body.text_2))

    async def rerank(self, body: RerankRequest, request: Request) -> dict[str, Any]:
        """The documents by their score for a query, best first."""
        found = await self._scores(body, request, [body.query], body.documents)
        order = sorted(range(len(found)), key=lambda index: -found[index][0])[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": found[index][0]} for index in order]
        for result in results if body.return_documents else ():
            if isinstance(text := body.documents[result["index"]].content, str):
                result["document"] = {"text": text}
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "results": results, "usage": _usage(found)}

    async def tokenize(self, body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """The token ids of a prompt, or of a conversation with its pictures, as a completion counts them."""
        if (body.prompt is None) != bool(body.messages):
            raise BadRequest("send either prompt or messages", field="prompt")
        if body.messages and body.add_special_tokens:
            raise BadRequest("the chat template adds special tokens; leave this out", field="add_special_tokens")
        await self._adapter(body.model)
        plain = PlainText(body.prompt or "", body.add_special_tokens is not False)
        prompt, images = _conversation(body, request) if body.messages else (plain, ())
        tokens = await unless_disconnected(request, self._front_end.tokenize(prompt, images, tenant(request)))
        names = [self._front_end.processor.token_text(token) for token in tokens] if body.return_token_strs else None
        longest = (await self._front_end.stats()).max_context
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": names}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids, with special tokens by name."""
        await self._adapter(body.model)
        return {"prompt": detokenize(self._front_end, body.tokens)}

    async def _scores(
        self, body: ScoreRequest | RerankRequest, request: Request, queries: Sequence[str], documents: Documents
    ) -> Sequence[tuple[float, Timings]]:
        """queries: one for all documents, or one for each."""
        pairs = []
        for place, document in enumerate(documents):
            (turn,), images = conversation_of([document], request)
            question = body.question or (PICTURE_QUESTION if images else TEXT_QUESTION)
            pairs.append((turn["content"], images, question_about(queries[place % len(queries)], question)))
        return await self._for_each(body, request, functools.partial(score, self._front_end), pairs)

    async def _for_each(
        self, body: ModelFields, request: Request, call: Callable[..., Awaitable[Any]], items: Sequence[Any]
    ) -> Sequence[Any]:
        """The results of a call for the arguments that each item has."""
        try:
            call = functools.partial(
                call, adapter=await self._adapter(body.model), level=Level.of(body, tenant(request))
            )
            return await unless_disconnected(request, for_each(self._front_end, lambda item: call(*item), items))
        except BadRequest as error:
            error.field = {"adapter": "model", "prompt": None}.get(error.field or "", error.field)
            raise

    async def _adapter(self, model: str | None) -> str | None:
        """The adapter that a model's name stands for; None for the base model. Raises UnknownAdapter."""
        return None if model in (None, self._model) else (await self._front_end.adapters.resolve(model)).adapter


def _conversation(body: EmbeddingRequest | TokenizeRequest, request: Request) -> tuple[Any, Sequence[Visual]]:
    messages, images = conversation_of(body.messages, request)
    return Conversation(messages, begins_answer=body.add_generation_prompt), images


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _usage(found: Sequence[tuple[Any, Timings]]) -> dict[str, Any]:
    prompt, cached = (sum(getattr(t, f"num_{kind}_tokens") for _, t in found) for kind in ("prompt", "cached"))
    return {"prompt_tokens": prompt, "total_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}


def _listed(kind: str, name: str, body: ModelFields, found: Sequence[tuple[Any, Timings]]) -> Response:
    data = [{"object": kind, "index": index, name: value} for index, (value, _) in enumerate(found)]
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
    whole = {**head, "object": "list", "data": data, "usage": _usage(found)}
    return Response(msgspec.json.encode(whole), media_type="application/json")
