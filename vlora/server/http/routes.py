"""HTTP routes over the front end: OpenAI's completions (the model name selects the adapter), heads, and adapters."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.types import ASGIApp

from vlora.client.values import Answer
from vlora.errors import Aborted, BadRequest, UnknownAdapter, VLoraError, listed
from vlora.server.body_route import BodyRoute
from vlora.server.console.routes import add_console
from vlora.server.detokenizer import Piece
from vlora.server.frontend import Conversation, FrontEnd, Prompt
from vlora.server.head_results import head_form
from vlora.server.http.chat_request import MAX_PARTS, ChatRequest
from vlora.server.http.chat_response import ChatAnswer, event
from vlora.server.http.errors import ErrorBody, error_body, handle_errors
from vlora.server.http.middleware import ADMIN_PATHS, guarded, tenant
from vlora.server.http.sampling_fields import Leveled, Sampled, Strict
from vlora.server.http.text_completions import CompletionRequest, TextAnswer
from vlora.server.http.tools import as_messages
from vlora.server.interleave import interleave
from vlora.server.security.access import Access
from vlora.types import AdapterStatus, SamplingParams

T = TypeVar("T")

_SHOWN = 128  # characters of an unknown name
_OPENAI_NAMES = {"prompt": "messages", "adapter": "model"}
"""Front end field -> field of chat completions."""

Parts = AsyncGenerator[tuple[int, Piece | Answer], None]
Form = ChatAnswer | TextAnswer


class HeadRequest(Leveled):
    """images: URLs, as many as the head reads."""

    images: list[str] = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)


class AdapterSource(Strict):
    """path: an adapter folder on the server's file system."""

    name: str
    path: str


def make_app(
    front_end: FrontEnd, model: str, access: Access, *, others_listen: Callable[[], bool] = lambda: True
) -> ASGIApp:
    """The ASGI application. model: the base model's name in requests; every other name is an adapter name.

    others_listen: whether the RPyC server accepts connections; otherwise the server is not ready.
    """
    app = FastAPI(
        title="V-LoRA",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
        # Declared for the OpenAPI document only; the middleware does the check.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if access.required else [],
    )
    handle_errors(app)
    _asking(app, front_end, model)  # first, because routes are matched in order
    _watching(app, front_end, model, others_listen)
    _administering(app, front_end)
    add_console(app, front_end, model, access)
    return guarded(app, access, front_end.metrics, front_end.held, front_end.config)


# -- routes -----------------------------------------------------------------------------------------------------------


def _watching(app: FastAPI, front_end: FrontEnd, model: str, others_listen: Callable[[], bool]) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine is alive."""
        await front_end.stats()
        return {"status": "ok", "model": model}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are accepted: 503 during shutdown or when a part of the server is dead."""
        if front_end.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not others_listen():
            return JSONResponse({"status": "rpyc takes no connections"}, 503)
        await front_end.stats()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in Prometheus text format."""
        return Response(await front_end.read_metrics(), media_type=CONTENT_TYPE_LATEST)


def _asking(app: FastAPI, front_end: FrontEnd, model: str) -> None:
    async def all_models() -> dict[str, dict[str, Any]]:
        parents = {model: None} | {status.name: model for status in await front_end.adapters()}
        # `root` is the base model's id, as in OpenAI's API: load generators find the model's tokenizer by it.
        shared = {"object": "model", "created": 0, "owned_by": "vlora", "root": model}
        return {name: {"id": name, "parent": parent, **shared} for name, parent in parents.items()}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The base model and every adapter."""
        return {"object": "list", "data": list((await all_models()).values())}

    @app.get("/v1/models/{name:path}")  # hub names contain a slash
    async def one_model(name: str) -> dict[str, Any]:
        """One model or adapter."""
        found = await all_models()
        if name not in found:
            raise UnknownAdapter(f"no model named {name[:_SHOWN]!r}; available: {listed(found)}")
        return found[name]

    short = APIRouter(route_class=BodyRoute)

    @short.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as one response or as server-sent events."""
        try:
            return await answer(body, request)
        except BadRequest as error:
            error.field = _OPENAI_NAMES.get(error.field or "", error.field)
            raise

    async def answer(body: ChatRequest, request: Request) -> Response:
        messages, images = body.conversation()
        prompt: Prompt = messages
        if body.offered or any(message.role == "tool" or message.tool_calls for message in body.messages):
            declared = [tool.model_dump(exclude={"function": {"strict"}}) for tool in body.offered]
            taken = front_end.takes_tools
            prompt = Conversation(messages, declared) if taken else as_messages(messages, declared)
        parts = ask(body, prompt, images, body.sampling(), request)
        form = ChatAnswer(
            answer_head("chatcmpl", body),
            logprobs=body.logprobs,
            counts=body.stream_options.continuous_usage_stats,
            tools=bool(body.offered),
        )
        return await respond(body, request, form, parts, body.n)

    @short.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue texts, without the chat template, as one response or as server-sent events."""
        sampling = body.sampling()
        streams = interleave([ask(body, prompt, (), sampling, request) for prompt in body.prompt])
        form = TextAnswer(
            answer_head("cmpl", body),
            body.n,
            body.echoed(),
            logprobs=body.logprobs is not None,
            counts=body.stream_options.continuous_usage_stats,
        )
        try:
            return await respond(body, request, form, _flat(streams, body.n), body.n * len(body.prompt))
        except BadRequest as error:
            error.field = "model" if error.field == "adapter" else error.field
            raise

    def ask(body: Sampled, prompt: Prompt, images: Sequence[str], sampling: SamplingParams, request: Request) -> Parts:
        return front_end.choices(
            prompt,
            images,
            num_choices=body.n,
            adapter=None if body.model == model else body.model,
            sampling=sampling,
            max_latency_s=body.max_latency_s,
            max_ttft_s=body.max_ttft_s,
            priority=body.priority,
            tenant=tenant(request),
            whole=not body.stream,
        )

    def answer_head(kind: str, body: Sampled) -> dict[str, Any]:
        return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    async def respond(body: Sampled, request: Request, form: Form, parts: Parts, num_choices: int) -> Response:
        if body.stream:
            # Await the first part here, so that an invalid request gets an error status.
            first = await _unless_disconnected(request, anext(parts))
            events = _events(form, num_choices, first, parts, include_usage=body.stream_options.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        async with contextlib.aclosing(parts):
            answers = await _unless_disconnected(request, _whole(parts, num_choices))
        return JSONResponse(form.whole(answers))

    app.include_router(short)

    @app.post("/v1/heads/{adapter}/{head}")
    async def ask_head(adapter: str, head: str, body: HeadRequest, request: Request) -> dict[str, Any]:
        """Run a task head: one pass, with the head's own question."""
        asked = front_end.ask_head(
            body.images,
            adapter,
            head,
            max_latency_s=body.max_latency_s,
            priority=body.priority,
            tenant=tenant(request),
        )
        return head_form(await _unless_disconnected(request, asked))


def _administering(app: FastAPI, front_end: FrontEnd) -> None:
    @app.get(ADMIN_PATHS)
    async def adapters() -> dict[str, Any]:
        """List the adapters: rank, size, heads, and whether each is on the device, pinned or mergeable."""
        return {"object": "list", "data": [_adapter(status) for status in await front_end.adapters()]}

    @app.post(ADMIN_PATHS, status_code=201)
    async def load_adapter(body: AdapterSource) -> dict[str, Any]:
        """Register an adapter folder on the server's file system; an existing name gets the new content."""
        return _adapter(await front_end.load_adapter(body.name, body.path))

    @app.delete(ADMIN_PATHS + "/{name}", status_code=204)
    async def unload_adapter(name: str, drain: bool = False) -> None:
        """Remove an adapter and cancel its requests, or with `?drain=true` let them finish."""
        await front_end.unload_adapter(name, drain)

    @app.put(ADMIN_PATHS + "/{name}/pin")
    async def pin_adapter(name: str) -> dict[str, Any]:
        """Load an adapter to the device and pin it there."""
        return _adapter(await front_end.pin_adapter(name, True))

    @app.delete(ADMIN_PATHS + "/{name}/pin")
    async def unpin_adapter(name: str) -> dict[str, Any]:
        """Unpin an adapter, so that it can be evicted."""
        return _adapter(await front_end.pin_adapter(name, False))


# -- request handling --------------------------------------------------------------------------------------------------


def _adapter(status: AdapterStatus) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(status)
    return fields


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


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await the work. When the client disconnects first, cancel the work and raise Aborted."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Aborted("the client disconnected")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})


async def _events(
    form: Form, num_choices: int, first: tuple[int, Piece | Answer], parts: Parts, *, include_usage: bool
) -> AsyncIterator[bytes]:
    async def all_parts() -> AsyncIterator[tuple[int, Piece | Answer]]:
        yield first
        async for part in parts:
            yield part

    # Begin and end events join the next event, because each write wakes the reader.
    pending = b"".join(form.begin(choice) for choice in range(num_choices))
    answers: dict[int, Answer] = {}
    async with contextlib.aclosing(parts):
        try:
            async for choice, part in all_parts():
                if isinstance(part, Piece):
                    if news := pending + form.piece(choice, part):
                        yield news
                    pending = b""
                else:
                    answers[choice] = part
                    pending += form.end(choice, part)
            if include_usage:
                pending += form.usage([answers[choice] for choice in range(num_choices)])
        except VLoraError as error:
            pending += event(error_body(error))
    yield pending + b"data: [DONE]\n\n"
