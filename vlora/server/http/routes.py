"""HTTP routes over the front end: OpenAI's completions (the model name selects the adapter), heads, health."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.types import ASGIApp

from vlora.client.values import Answer, HeadOutcome
from vlora.config import Token
from vlora.errors import BadRequest, UnknownAdapter, VLoraError, listed
from vlora.server.batches.runner import BatchRunner, FileRoutes
from vlora.server.batches.store import FileStore
from vlora.server.console.routes import ConsoleRoutes
from vlora.server.detokenizer import Piece
from vlora.server.execution import interleave
from vlora.server.frontend import FrontEnd
from vlora.server.http.chat_request import MAX_PARTS, ByUrl, ChatRequest, conversation_of
from vlora.server.http.chat_response import ChatResponseBuilder, event, head_json
from vlora.server.http.embedding_routes import EmbeddingRoutes
from vlora.server.http.errors import ErrorBody, add_error_handlers, error_body, unless_disconnected
from vlora.server.http.middleware import with_checks
from vlora.server.http.operator_routes import add_operator_routes
from vlora.server.http.responses import ResponsesBuilder, ResponsesRequest
from vlora.server.http.sampling_fields import SamplingFields, ServiceLevelFields, StrictModel
from vlora.server.http.text_completions import CompletionRequest, TextResponseBuilder
from vlora.server.http.tools import as_messages
from vlora.server.prompts import Asked, Conversation, Level, TextRequest
from vlora.server.security.access import Access, caller_of, tenant
from vlora.server.security.public_errors import error_for, shown_to
from vlora.types import SamplingParams

_SHOWN = 128  # characters of an unknown name
_OPENAI_NAMES = {"prompt": "messages", "adapter": "model"}
"""Front end field -> field of chat completions."""

Parts = AsyncGenerator[tuple[int, Piece | Answer], None]
ResponseBuilder = ChatResponseBuilder | TextResponseBuilder | ResponsesBuilder


class HeadRequest(ServiceLevelFields):
    """images: URLs, as many as the head reads."""

    images: list[str] = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)


class HeadName(StrictModel):
    """A head. adapter: the name of an adapter or a domain. head: without it, the domain's."""

    adapter: str
    head: str | None = None


class HeadsRequest(HeadRequest):
    """images: URLs, as many as each of the heads reads."""

    heads: list[HeadName] = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)


def make_app(
    front_end: FrontEnd,
    model: str,
    access: Access,
    rpyc_listens: Callable[[], bool] = lambda: True,
    files: FileStore | None = None,
) -> ASGIApp:
    """The ASGI application.

    Args:
        model: The base model's name in requests; every other name is an adapter name.
        rpyc_listens: Whether RPyC takes new connections; while it does not, this server is not ready either.
        files: With the batches that are continued while the application runs; None to keep none.
    """
    app = FastAPI(
        lifespan=lambda _: contextlib.nullcontext() if batches is None else batches.running(),
        title="V-LoRA",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
        # Declared for the OpenAPI document only; the middleware does the check.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if access.required else [],
    )
    add_error_handlers(app)
    app.state.files = files
    StateRoutes(front_end, model, rpyc_listens).add_to(app)
    CompletionRoutes(front_end, model).add_to(app)
    EmbeddingRoutes(front_end, model).add_to(app)
    add_operator_routes(app, front_end)
    checked = with_checks(app, access, front_end)
    batches: BatchRunner | None = None if files is None else BatchRunner(files, checked, front_end, access)
    FileRoutes(batches).add_to(app)
    ConsoleRoutes(front_end, model).add_to(app)
    return checked


@dataclasses.dataclass(eq=False)
class StateRoutes:
    """Health checks, metrics, and the list of models: the base model, every adapter and every domain."""

    front_end: FrontEnd
    model: str
    rpyc_listens: Callable[[], bool]

    def add_to(self, app: FastAPI) -> None:
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.one_model)  # hub names contain a slash
        for path, endpoint in (("/health", self.health), ("/ready", self.ready)):
            app.get(path)(endpoint)
            app.head(path, include_in_schema=False)(endpoint)
        app.get("/metrics")(self.metrics)

    async def health(self) -> dict[str, str]:
        """Whether the engine is alive."""
        await self.front_end.stats()
        return {"status": "ok", "model": self.model}

    async def ready(self) -> Response:
        """Whether requests are accepted: 503 during shutdown or when a part of the server is dead."""
        if self.front_end.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not self.rpyc_listens():
            return JSONResponse({"status": "rpyc takes no connections"}, 503)
        await self.front_end.stats()
        return JSONResponse({"status": "ready"})

    async def metrics(self) -> Response:
        """Metrics in Prometheus text format."""
        return Response(await self.front_end.read_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        """The base model, every adapter, and every domain with its adapter."""
        return {"object": "list", "data": list((await self._models_by_name()).values())}

    async def one_model(self, name: str) -> dict[str, Any]:
        """One model, adapter or domain."""
        found = await self._models_by_name()
        if name not in found:
            raise UnknownAdapter(f"no model named {name[:_SHOWN]!r}; available: {listed(found)}")
        return found[name]

    async def _models_by_name(self) -> dict[str, dict[str, Any]]:
        # `root` is the base model's id, as in OpenAI's API: load generators find the model's tokenizer by it.
        shared = {"object": "model", "created": 0, "owned_by": "vlora", "root": self.model}
        found = {self.model: {"id": self.model, "parent": None, **shared}}
        for status in await self.front_end.adapters.list():
            names = [domain.name for domain in status.domains]
            found[status.name] = {"id": status.name, "parent": self.model, **shared, "domains": names}
        for adapter, domain in self.front_end.adapters.domains():
            found.setdefault(domain.name, {"id": domain.name, "parent": adapter, **shared})["answer"] = domain.answer
        return found


class BodyRoute(APIRoute):
    """For `async def endpoint(body: Model, request: Request) -> Response`, documented as any other route.

    FastAPI's generic handling of signatures takes about as long as the rest of request parsing. A valid body bypasses
    it; every other request takes FastAPI's path, which reports the error.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler that parses the body directly."""
        generic_handler = super().get_route_handler()
        endpoint: Callable[[Any, Request], Awaitable[Response]] = self.endpoint
        (model, _) = (each.annotation for each in inspect.signature(endpoint, eval_str=True).parameters.values())
        assert issubclass(model, BaseModel)

        async def handle(request: Request) -> Response:
            if request.headers.get("content-type") == "application/json":
                data = await request.body()  # the request caches it
                try:
                    body = model.model_validate(json.loads(data))
                except (ValueError, RecursionError):
                    return await generic_handler(request)
                return await endpoint(body, request)
            return await generic_handler(request)

        return handle


class CompletionRoutes:
    """Requests for answers: chat completions, text completions, task heads."""

    def __init__(self, front_end: FrontEnd, model: str) -> None:
        self._front_end = front_end
        self._model = model

    def add_to(self, app: FastAPI) -> None:
        router = APIRouter(route_class=BodyRoute)
        router.post("/v1/chat/completions")(self.chat)
        router.post("/v1/completions")(self.complete)
        router.post("/v1/responses")(self.respond)
        app.include_router(router)
        app.post("/v1/heads")(self.ask_heads)
        app.post("/v1/heads/{adapter}/{head}")(self.ask_head)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as one response or as server-sent events."""
        try:
            prompt, images = self._read_prompt(body, request)
            request_id = uuid.uuid4().hex
            parts = self._generate(body, prompt, images, body.sampling(), request, request_id)
            builder = ChatResponseBuilder(
                _response_head(f"chatcmpl-{request_id}", body),
                body.n,
                logprobs=body.logprobs,
                counts=body.stream_options.continuous_usage_stats,
                tools=bool(body.offered),
            )
            return await _respond(body, request, builder, parts, body.n)
        except BadRequest as error:
            error.field = _OPENAI_NAMES.get(error.field or "", error.field)
            raise

    async def respond(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's responses, as one or as server-sent events; nothing is kept."""
        chat, name = body.as_chat(), uuid.uuid4().hex
        try:
            prompt, images = self._read_prompt(chat, request)
            parts = self._generate(chat, prompt, images, chat.sampling(), request, name)
            return await _respond(chat, request, ResponsesBuilder(name, int(time.time()), body), parts, 1)
        except BadRequest as error:
            names = {"prompt": "input", "adapter": "model", "response_format": "text"}
            error.field = names.get(error.field or "", error.field)
            raise

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts, without the chat template, as one response or as server-sent events."""
        sampling = body.sampling()
        streams = interleave([self._generate(body, prompt, (), sampling, request) for prompt in body.prompt])
        builder = TextResponseBuilder(
            _response_head(f"cmpl-{uuid.uuid4().hex}", body),
            body.n,
            body.echoed(),
            logprobs=body.logprobs is not None,
            counts=body.stream_options.continuous_usage_stats,
        )
        try:
            return await _respond(body, request, builder, _flat(streams, body.n), body.n * len(body.prompt))
        except BadRequest as error:
            error.field = "model" if error.field == "adapter" else error.field
            raise

    async def ask_head(self, adapter: str, head: str, body: HeadRequest, request: Request) -> dict[str, Any]:
        """Run a task head: one pass, with the head's own question."""
        answering = self._front_end.ask_head(body.images, adapter, head, Level.of(body, tenant(request)))
        return head_json(await unless_disconnected(request, answering))

    async def ask_heads(self, body: HeadsRequest, request: Request) -> dict[str, Any]:
        """Run several task heads over the same images. `data` has the answer or the error of each, in order."""
        pairs = [(each.adapter, each.head) for each in body.heads]
        answering = self._front_end.ask_heads(body.images, pairs, Level.of(body, tenant(request)))
        outcomes = await unless_disconnected(request, answering)
        shown = shown_to(outcomes, caller_of(request))
        return {"object": "list", "data": [_outcome_json(outcome) for outcome in shown]}

    def _read_prompt(self, body: ChatRequest, request: Request) -> tuple[Asked, list[ByUrl]]:
        """The conversation with its tools, and the URLs of images, videos and their frames."""
        messages, images = conversation_of(body.messages, request)
        if not body.offered and not any(message.role == "tool" or message.tool_calls for message in body.messages):
            return messages, images
        declared = [tool.model_dump(exclude={"function": {"strict"}}) for tool in body.offered]
        if self._front_end.processor.takes_tools:
            return Conversation(messages, declared), images
        return as_messages(messages, declared), images

    def _generate(
        self,
        body: SamplingFields,
        prompt: Asked,
        images: Sequence[ByUrl],
        sampling: SamplingParams,
        request: Request,
        request_id: str | None = None,
    ) -> Parts:
        asked = TextRequest(
            prompt,
            images,
            adapter=None if body.model == self._model else body.model,
            sampling=sampling,
            level=Level.of(body, tenant(request)),
            num_choices=body.n,
            whole=not body.stream,
            answer=body.answer if isinstance(body, ChatRequest) else "words",
        )
        return self._front_end.generate(asked, request_id)


# -- responses --------------------------------------------------------------------------------------------------------


def _response_head(name: str, body: SamplingFields) -> dict[str, Any]:
    return {"id": name, "created": int(time.time()), "model": body.model}


async def _respond(
    body: SamplingFields, request: Request, builder: ResponseBuilder, parts: Parts, num_choices: int
) -> Response:
    if body.stream:
        # Await the first part here, so that an invalid request gets an error status.
        first = await unless_disconnected(request, anext(parts))
        usage, caller = body.stream_options.include_usage, caller_of(request)
        events = _events(builder, num_choices, first, parts, include_usage=usage, caller=caller)
        return StreamingResponse(events, media_type="text/event-stream")
    async with contextlib.aclosing(parts):
        answers = await unless_disconnected(request, _whole(parts, num_choices))
    return JSONResponse(builder.whole(answers))


async def _flat(
    streams: AsyncGenerator[tuple[int, tuple[int, Piece | Answer]], None], num_choices: int
) -> AsyncGenerator[tuple[int, Piece | Answer], None]:
    """Choices of several prompts, numbered consecutively."""
    async with contextlib.aclosing(streams):
        async for prompt, (choice, part) in streams:
            yield prompt * num_choices + choice, part


async def _whole(parts: Parts, num_choices: int) -> list[Answer]:
    answers: list[Answer | None] = [None] * num_choices
    async for choice, part in parts:
        if isinstance(part, Answer):
            answers[choice] = part
    return [answer for answer in answers if answer is not None]


async def _events(
    builder: ResponseBuilder,
    num_choices: int,
    first: tuple[int, Piece | Answer],
    parts: Parts,
    *,
    include_usage: bool,
    caller: Token | None,
) -> AsyncIterator[bytes]:
    # Begin and end events join the next event, because each write wakes the reader.
    pending = b"".join(builder.begin(choice) for choice in range(num_choices))
    answers: dict[int, Answer] = {}
    async with contextlib.aclosing(parts):
        try:
            async for choice, part in _chain(first, parts):
                if isinstance(part, Piece):
                    if news := pending + builder.piece(choice, part):
                        yield news
                    pending = b""
                else:
                    answers[choice] = part
                    pending += builder.end(choice, part)
            if include_usage:
                pending += builder.usage([answers[choice] for choice in range(num_choices)])
        except VLoraError as error:
            pending += event(error_body(error_for(error, caller)))
    yield pending + b"data: [DONE]\n\n"


async def _chain(first: tuple[int, Piece | Answer], parts: Parts) -> AsyncIterator[tuple[int, Piece | Answer]]:
    yield first
    async for part in parts:
        yield part


def _outcome_json(outcome: HeadOutcome) -> dict[str, Any]:
    """The JSON object of one of several heads: its result, or its error."""
    if outcome.answer is not None:
        return head_json(outcome.answer)
    assert outcome.error is not None
    return error_body(outcome.error.to_exception())
