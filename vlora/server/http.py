"""The HTTP API: OpenAI's chat completions over the front end, where the adapter is the model's name."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlora.client.values import Answer
from vlora.config import ServerConfig
from vlora.errors import Aborted, BadConfig, BadImage, BadRequest, TooLarge, VLoraError
from vlora.server.frontend import FrontEnd
from vlora.types import SamplingParams

T = TypeVar("T")


class _Strict(BaseModel):
    # A field that is not served must not be ignored: it would change the answer.
    model_config = ConfigDict(extra="forbid")


class ImageUrl(_Strict):
    url: str
    detail: str | None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class ChatMessage(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class StreamOptions(_Strict):
    include_usage: bool = False


class ChatRequest(_Strict):
    """What is served of OpenAI's request; images are data URLs."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None


def make_app(front_end: FrontEnd, model: str) -> ASGIApp:
    """The ASGI application. model: the base model's name in requests; every other name is an adapter's."""
    app = FastAPI(title="V-LoRA", docs_url=None, redoc_url=None)

    @app.exception_handler(VLoraError)
    async def refuse(_: Request, error: VLoraError) -> Response:
        return JSONResponse(_error(error), error.http_status)

    @app.exception_handler(RequestValidationError)
    async def refuse_fields(_: Request, error: RequestValidationError) -> Response:
        return JSONResponse(_error(BadRequest(_first_mistake(error))), BadRequest.http_status)

    @app.exception_handler(HTTPException)
    async def refuse_call(_: Request, error: HTTPException) -> Response:
        cause = error.__cause__ if isinstance(error.__cause__, VLoraError) else BadRequest(str(error.detail))
        status = cause.http_status if cause is error.__cause__ else error.status_code
        return JSONResponse(_error(cause), status)

    @app.exception_handler(Exception)
    async def confess(_: Request, error: Exception) -> Response:
        mistake = VLoraError(f"the server made a mistake: {type(error).__name__}: {error}")
        return JSONResponse(_error(mistake), mistake.http_status)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine lives."""
        await front_end.stats()
        return {"status": "ok", "model": model}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The base model and every adapter."""
        parents = {model: None} | {status.name: model for status in await front_end.adapters()}
        shared = {"object": "model", "created": 0, "owned_by": "vlora"}
        return {
            "object": "list",
            "data": [{"id": name, "parent": parent, **shared} for name, parent in parents.items()],
        }

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        parts = _generate(front_end, model, body)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        if body.stream:
            # The first part is awaited here, so that a request that is wrong gets its status.
            first = await _unless_disconnected(request, anext(parts))
            return StreamingResponse(_events(head, first, parts, body.stream_options), media_type="text/event-stream")
        async with contextlib.aclosing(parts):
            answer = await _unless_disconnected(request, _last(parts))
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)})

    return _BoundedBody(app, front_end.config.max_message_bytes)


class HttpServer:
    """uvicorn in this event loop. Raises BadConfig when it cannot listen."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.http_port is not None
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((config.host, config.http_port))
        except OSError as error:
            self._socket.close()
            where = f"{config.host}:{config.http_port}"
            raise BadConfig(f"cannot listen on {where}: {error.strerror}; choose another --http-port") from error
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        self._socket.listen()  # from here on callers wait instead of being refused
        settings = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        self._server = _Uvicorn(settings)
        self._running = asyncio.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        if self._server is not None and self._running is not None:
            self._server.should_exit = True
            await asyncio.wait({self._running})
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The supervisor has the signals."""
        yield


class _BoundedBody:
    """Refuses bodies over a size before they are held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = TooLarge(f"the body is over this server's limit of {self._max_bytes} bytes")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await JSONResponse(_error(error), error.http_status)(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise error
            return message

        await self._app(scope, bounded, send)


# -- a request's way --------------------------------------------------------------------------------------------------


def _generate(front_end: FrontEnd, model: str, body: ChatRequest) -> Any:
    limits = (body.max_completion_tokens, body.max_tokens, SamplingParams().max_tokens)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    messages, images = _conversation(body.messages)
    return front_end.generate(
        messages,
        images,
        adapter=None if body.model == model else body.model,
        sampling=SamplingParams(
            max_tokens=next(given for given in limits if given is not None),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=stop,
        ),
    )


def _conversation(messages: list[ChatMessage]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Messages as chat templates take them, and the images in order."""
    images: list[bytes] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        parts = [TextPart(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        content: list[dict[str, str]] = []
        for part in parts:
            if isinstance(part, TextPart):
                content.append({"type": "text", "text": part.text})
            else:
                images.append(_data_url(part.image_url.url, len(images) + 1))
                content.append({"type": "image"})
        plain.append({"role": message.role, "content": content})
    return plain, images


def _data_url(url: str, number: int) -> bytes:
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise BadRequest(f"image {number}: only data URLs are taken (data:image/png;base64,...)")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise BadImage(f"image {number} is not base64: {error}") from error


async def _last(parts: AsyncIterator[str | Answer]) -> Answer:
    *_, answer = [part async for part in parts]
    assert isinstance(answer, Answer)
    return answer


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Raises Aborted, and cancels the work, when the client leaves first."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Aborted("the client left")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})


async def _events(
    head: dict[str, Any], first: str | Answer, parts: AsyncIterator[str | Answer], options: StreamOptions
) -> AsyncIterator[str]:
    def event(delta: dict[str, str], finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return _event({**head, "object": "chat.completion.chunk", "choices": [choice]})

    async def all_parts() -> AsyncIterator[str | Answer]:
        yield first
        async for part in parts:
            yield part

    yield event({"role": "assistant", "content": ""})
    async with contextlib.aclosing(parts):  # type: ignore[type-var]
        try:
            async for part in all_parts():
                if isinstance(part, str):
                    yield event({"content": part})
                    continue
                yield event({}, part.finish_reason)
                if options.include_usage:
                    chunk = {"object": "chat.completion.chunk", "choices": [], "usage": _usage(part)}
                    yield _event({**head, **chunk})
        except VLoraError as error:
            yield _event(_error(error))
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_completion_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
    }


def _error(error: VLoraError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.code, "code": error.code, "param": None}}


def _first_mistake(error: RequestValidationError) -> str:
    mistake = error.errors()[0]
    place = ".".join(str(step) for step in mistake["loc"] if step != "body") or "body"
    if mistake["type"] == "extra_forbidden":
        return f"{place}: this field is not served"
    return f"{place}: {mistake['msg']}"
