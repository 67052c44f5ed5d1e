"""Errors as OpenAI's error body, with the HTTP status of the error class."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from vlora.errors import Aborted, BadRequest, DeadlineUnreachable, OverCapacity, Unauthorized, VLoraError
from vlora.server.security.access import caller_of
from vlora.server.security.public_errors import error_for
from vlora.wording import json_errors, pydantic_errors

log = logging.getLogger(__name__)

_SHOWN = 100  # characters of a path: it may be as long as a header
_CONTAINERS = ("list_type", "model_type", "model_attributes_type")  # pydantic's errors
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """message: problem, value, remedy. code: V-LoRA's error code. param: the field at fault, if any."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def error_body(error: VLoraError, *, status: int | None = None, param: str | None = None) -> dict[str, object]:
    status = error.http_status if status is None else status
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # The caller's text may contain an unpaired surrogate, which cannot be encoded.
    message = str(error).encode(errors="replace").decode()
    param = None if param is None else param.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "code": error.code, "param": param}}


def error_response(error: VLoraError, *, status: int | None = None, param: str | None = None) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, OverCapacity | DeadlineUnreachable):
        headers["Retry-After"] = str(math.ceil(error.retry_s) if isinstance(error, OverCapacity) else 1)
    body = error_body(error, status=status, param=param)
    return JSONResponse(body, error.http_status if status is None else status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers that convert every exception of the app to this body."""
    app.exception_handler(VLoraError)(_on_vlora_error)
    app.exception_handler(RequestValidationError)(_on_invalid_body)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(ClientDisconnect)(_on_disconnect)
    app.exception_handler(Exception)(_on_internal_error)


async def _on_vlora_error(request: Request, error: VLoraError) -> Response:
    error = error_for(error, caller_of(request))
    return error_response(error, param=error.field if isinstance(error, BadRequest) else None)


async def _on_invalid_body(_: Request, error: RequestValidationError) -> Response:
    param, message = first_problem(error.errors())
    return error_response(BadRequest(message), param=param)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    if isinstance(error.__cause__, VLoraError):
        return error_response(error_for(error.__cause__, caller_of(request)))
    response = error_response(BadRequest(_why(request, error)), status=error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(_: Request, __: ClientDisconnect) -> Response:
    """The client disconnected during its body, which is no server error; the response is not read."""
    return error_response(Aborted("the client disconnected"))


async def _on_internal_error(_: Request, error: Exception) -> Response:
    return error_response(VLoraError(f"internal server error ({type(error).__name__}); see the server log"))


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Await the work. When the client disconnects first, cancel the work and raise Aborted."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.create_task(_wait_disconnected(request))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Aborted("the client disconnected")
        return working.result()
    finally:
        disconnecting.cancel()
        working.cancel()
        await asyncio.wait({working, disconnecting})


async def _wait_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _why(request: Request, error: HTTPException) -> str:
    """The message for an error of FastAPI or Starlette."""
    match error.status_code, error.__cause__:
        case _, UnicodeDecodeError():  # from Python's JSON parser, here and below
            return "the body is not JSON: it is not UTF-8 text, or it is compressed, which is not supported"
        case _, RecursionError() | ValueError():
            return "the body cannot be parsed: it is nested too deeply or contains a number that is too long"
        case 404, _:
            return f"there is no route {request.url.path[:_SHOWN]!r}; the API is under /v1, see /openapi.json"
        case 405, _:
            methods = (error.headers or {}).get("Allow", "another method")
            return f"{request.method[:_SHOWN]} is not allowed for {request.url.path[:_SHOWN]!r}; use {methods}"
    return str(error.detail)


def first_problem(problems: Sequence[Any]) -> tuple[str | None, str]:
    """The field at fault, if any, and the problem. problems: pydantic's."""
    problem = problems[0]
    match problem["type"], problem["loc"]:
        case "json_invalid", (_, place):
            return None, f"the body is not JSON: {json_errors.problem(problem['ctx']['error'])} at character {place}"
        case "missing", ("body",):
            return None, "the body is empty; send a JSON object"
        case _, ("body",) if problem["type"].endswith("_type"):
            return None, "the body is not a JSON object; send one with Content-Type: application/json"
    # A field of two types has an error for each. An error inside the second type is more specific than the first error.
    also = ""
    if problem["loc"] and _is_form(problem["loc"][-1]):
        field = problem["loc"][:-1]
        others = [each for each in problems[1:] if each["loc"][: len(field)] == field]
        if others and others[0]["loc"][:-1] == field and others[0]["type"] in _CONTAINERS:
            also = pydantic_errors.EXPECTED[others[0]["type"].removesuffix("_type")]
        elif others:
            return first_problem(others)
    field_name = ".".join(map(str, _steps(problem["loc"]))) or None
    if problem["type"] == "extra_forbidden":
        return field_name, f"{field_name}: this field is not supported"
    why = pydantic_errors.described(problem, also=also)
    between = ": " if problem["type"] == "value_error" else " "
    return field_name, f"{field_name or 'body'}{between}{why}"


def _is_form(step: str | int) -> bool:
    """Whether a location step names a type that pydantic tried, not a field."""
    return step in ("str", "NamedTool") or str(step).startswith(("list[", "literal["))


def _steps(place: tuple[str | int, ...]) -> list[str | int]:
    """The location's steps that are field names or item indices."""
    steps: list[str | int] = []
    rest = list(place)
    if rest[:1] == ["body"]:
        del rest[0]
    while rest:
        step = rest.pop(0)
        if steps and _is_form(step):
            if str(step).startswith("list[tagged-union[") and len(rest) > 1:
                del rest[1]  # after the item's index: the tag of its type
            continue
        steps.append(step)
    return steps
